"""Which operations of a trace are collectives: their kind, mesh axes and module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from meshwright.compiled.collectives import Collective, read_collectives
from meshwright.compiled.hlo import parse_hlo

_KINDS = {
    "all-reduce": "all.?reduce|psum(?!_scatter)",
    "all-gather": "all.?gather",
    "reduce-scatter": "reduce.?scatter|psum_scatter",
    "all-to-all": "all.?to.?all",
    "collective-permute": "collective.?permute|ppermute|send.?recv",
    "collective-broadcast": "collective.?broadcast|pbroadcast|Kernel_Broadcast",
}
_KERNEL = re.compile(r"nccl|rccl", re.IGNORECASE)


@dataclass(frozen=True)
class TracedCollective:
    """A collective instruction of the compiled program.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute, …
        axes: the mesh axes it runs over; empty if not known.
        module: the module it belongs to; None outside modules, or if it combines several.
        sent_bytes: bytes each device sends per execution; None if not known.
    """

    kind: str
    axes: tuple[str, ...] = ()
    module: str | None = None
    sent_bytes: float | None = None


class CollectiveNames:
    """Finds the collectives of a trace by the names of operations.

    Args:
        program: HLO text of the program, for axes and modules; None if not available.
        mesh: sizes of the mesh axes it was compiled for.
    """

    def __init__(self, program: str | None, mesh: Mapping[str, int]) -> None:
        self._by_instruction = _instructions(program, mesh) if program else None

    def find(self, name: str, kernel: str) -> TracedCollective | None:
        """Return the collective an operation belongs to; None if it computes."""
        if self._by_instruction is not None and name in self._by_instruction:
            return self._by_instruction[name]
        if _KERNEL.search(kernel):
            return TracedCollective(_kind(kernel, "") or "collective")
        # Without the program only names are left; a fusion may be named after its consumer.
        kind = (
            "" if self._by_instruction is not None or "fusion" in name else _kind(name, r"(\w+\.)?")
        )
        return TracedCollective(kind) if kind else None


def _kind(text: str, before: str) -> str:
    look = re.match if before else re.search
    matches = (
        kind
        for kind, pattern in _KINDS.items()
        if look(f"{before}({pattern})", text, re.IGNORECASE)
    )
    return next(matches, "")


def _instructions(program: str, mesh: Mapping[str, int]) -> dict[str, TracedCollective]:
    """Return the collectives of a program by the names of their instructions."""
    parts: dict[str, list[Collective]] = {}
    for collective in read_collectives(program, mesh):
        parts.setdefault(collective.name, []).append(collective)
    by_name = {name: _combine(combined) for name, combined in parts.items()}
    for computation in parse_hlo(program).computations.values():
        for instruction in computation.instructions:
            # Waiting for a collective counts as part of it.
            if instruction.opcode.endswith("-done") and instruction.operands[0] in by_name:
                by_name[instruction.name] = by_name[instruction.operands[0]]
    return by_name


def _combine(parts: list[Collective]) -> TracedCollective:
    axes = list(dict.fromkeys(axis for part in parts for axis in part.axes))
    return TracedCollective(
        kind=parts[0].kind,
        axes=tuple(axes),
        module=_common([part.module for part in parts]) or None,
        sent_bytes=sum(part.sent_bytes / max(part.count, 1) for part in parts),
    )


def _common(modules: Iterable[str]) -> str:
    """Return the innermost module that contains all of these."""
    steps = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))
