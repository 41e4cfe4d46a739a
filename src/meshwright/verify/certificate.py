"""What a proof found, for people and for files."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from meshwright.config.base import Frozen


class Comparison(Frozen):
    """One quantity compared between one device and the mesh.

    Attributes:
        what: loss, gradients or parameters.
        equal: whether every difference is within the tolerance.
        tolerance: largest difference allowed.
        worst: where the difference is largest.
        difference: that difference.
        first_different: the first leaf or update beyond the tolerance.
        first_difference: by how much.
    """

    what: str
    equal: bool
    tolerance: float
    worst: str
    difference: float
    first_different: str | None = None
    first_difference: float | None = None

    def sentence(self) -> str:
        """Return the comparison in one line."""
        if self.equal:
            return f"{self.what}: equal, largest difference {self.difference:.1e} ({self.worst})"
        return (
            f"{self.what}: `{self.first_different}` differs by {self.first_difference:.2e}, "
            f"more than {self.tolerance:.1e}"
        )


class Certificate(Frozen):
    """The outcome of running the same training on one device and on the mesh.

    Attributes:
        equal: whether everything agreed.
        mesh: the mesh.
        plan: the whole plan.
        steps: updates compared in float64.
        parameters: number of trained parameters.
        float64: comparisons with every number held as float64.
        null_leaves: leaves whose true gradient is zero, compared against the global norm.
        own_precision: comparisons in the plan's own number format.
        versions: of what computed it.
        date: when.
    """

    equal: bool
    mesh: dict[str, int]
    plan: dict[str, Any]
    steps: int
    parameters: int
    float64: list[Comparison]
    null_leaves: list[str] = Field(default_factory=list[str])
    own_precision: list[Comparison]
    versions: dict[str, str]
    date: str

    def failures(self) -> list[Comparison]:
        """Return the comparisons that did not hold."""
        return [c for c in (*self.float64, *self.own_precision) if not c.equal]
