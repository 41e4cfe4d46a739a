"""What a proof found, for people and for files."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from meshwright.config.base import Frozen


class Comparison(Frozen):
    """One quantity compared with what it should be.

    Attributes:
        what: loss, gradients, parameters, state or initial values.
        equal: whether every difference is within the tolerance.
        tolerance: largest difference allowed.
        worst: where the difference is largest.
        difference: that difference; null if it is not finite.
        first_different: the first leaf or update beyond the tolerance; null if there is none.
        first_difference: by how much; null if there is none or if it is not finite.
    """

    what: str
    equal: bool
    tolerance: float
    worst: str
    difference: float | None
    first_different: str | None = None
    first_difference: float | None = None

    def sentence(self) -> str:
        """Return the comparison in one line."""
        if self.equal:
            return f"{self.what}: equal, largest difference {self.difference:.1e} ({self.worst})"
        if self.first_difference is None:
            return f"{self.what}: `{self.first_different}` differs by a number that is not finite"
        return (
            f"{self.what}: `{self.first_different}` differs by {self.first_difference:.2e}, "
            f"more than {self.tolerance:.1e}"
        )


class Certificate(Frozen):
    """The outcome of running the same training on one device and on the mesh.

    Attributes:
        equal: whether everything agreed.
        mesh: axis sizes; empty for one device.
        plan: the whole plan.
        steps: updates compared in float64.
        parameters: number of trained parameters.
        float64: one device and the mesh, with every number held as float64: the loss of every
            update, the gradients of the first, parameters and the model's other state after the
            last.
        null_leaves: leaves whose true gradient is zero, compared against the global norm. The
            rounding noise it consists of is given to neither optimizer.
        own_precision: the first update on the mesh in the plan's own number format, initial values
            included.
        as_written: the float64 reference against the loss as its author wrote it, on one device
            in float32, without anything of Meshwright.
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
    as_written: list[Comparison]
    versions: dict[str, str]
    date: str

    def comparisons(self) -> list[Comparison]:
        """Return every comparison made."""
        return [*self.float64, *self.own_precision, *self.as_written]

    def failures(self) -> list[Comparison]:
        """Return the comparisons that did not hold."""
        return [c for c in self.comparisons() if not c.equal]
