"""Which parts of a program kernels evaluate, and why others are evaluated as written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Substitution:
    """A part of a program that a kernel evaluates, or could evaluate.

    Attributes:
        kind: what it computes: ``attention``, ``loss``, ``norm`` or ``activation``.
        module: where.
        kernel: what evaluates it; empty if it is evaluated as written.
        detail: what is special about it, such as ``causal``.
        reason: why it is evaluated as written; empty if a kernel evaluates it.
    """

    kind: str
    module: str
    kernel: str = ""
    detail: str = ""
    reason: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        detail = f" ({self.detail})" if self.detail else ""
        what = self.kernel or f"as written, because {self.reason}"
        return f"{self.kind}{detail}{where}: {what}"


def describe(substitutions: Sequence[Substitution]) -> list[str]:
    """Return a line for each kind; those that differ only in their block share one."""
    counts: dict[Substitution, int] = {}
    for one in substitutions:
        parts = ["*" if part.isdecimal() else part for part in one.module.split(".")]
        alike = replace(one, module=".".join(parts))
        counts[alike] = counts.get(alike, 0) + 1
    return [str(one) + (f" × {count}" if count > 1 else "") for one, count in counts.items()]
