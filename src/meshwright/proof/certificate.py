"""The certificate: what `verify` compared, with the differences, the tolerances and the verdict."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from meshwright.config.base import Frozen
from meshwright.mesh.axes import describe_sizes
from meshwright.units import counted


class Comparison(Frozen):
    """One quantity compared with its expected value.

    Attributes:
        what: loss, gradients, parameters, state or initial values.
        equal: whether every difference is within the tolerance.
        tolerance: the largest difference allowed.
        worst: the leaf or update with the largest difference.
        difference: the largest difference; null if it is not finite.
        first_different: the first leaf or update beyond the tolerance; null if there is none.
        first_difference: its difference; null if there is none or if it is not finite.
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
            return (
                f"{self.what}: equal, largest difference {self.difference:.1e} ({self.worst}), "
                f"tolerance {self.tolerance:.1e}"
            )
        if self.first_difference is None:
            return f"{self.what}: `{self.first_different}` differs by a number that is not finite"
        return (
            f"{self.what}: `{self.first_different}` differs by {self.first_difference:.2e}, "
            f"more than {self.tolerance:.1e}"
        )


class Certificate(Frozen):
    """The result of `verify`: the same training on one device and on the mesh, compared.

    Attributes:
        equal: whether every comparison is within its tolerance.
        mesh: axis sizes; empty for one device.
        plan: the whole plan.
        steps: number of updates compared in float64.
        parameters: number of trained parameters.
        float64: one device against the mesh, all floats being float64: the loss of every update,
            the gradients of the first update, and the parameters and other state of the model
            after the last.
        null_leaves: leaves whose true gradient is zero, so that the computed one is rounding
            noise. They are compared relative to the global norm, and both optimizers get zeros
            for them.
        own_precision: the mesh in the precision of the plan: initial values, and loss and
            gradients of the first update.
        as_written: the float64 reference against the loss as its author wrote it, run on one
            device in float32 without any of Meshwright's transformations.
        warnings: what training warns about, such as a loss that reads the number of devices.
        versions: versions of Meshwright, JAX, Flax and Optax.
        date: when the certificate was made.
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
    warnings: list[str] = Field(default_factory=list[str])
    versions: dict[str, str]
    date: str

    def __str__(self) -> str:
        """Return the verdict, and every comparison with its difference and tolerance."""
        lines = [f"{self.configuration()}: {self.verdict()}"]
        for title, comparisons in self.sections():
            lines += [title, *(f"  {comparison.sentence()}" for comparison in comparisons)]
        if self.null_leaves:
            lines.append(self.null_leaves_note())
        lines += [f"warning: {warning}" for warning in self.warnings]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return "\n".join([*lines, f"{versions}, {self.date}"])

    def __repr__(self) -> str:
        return f"Certificate(equal={self.equal}, mesh={self.mesh}, steps={self.steps})"

    def verdict(self) -> str:
        """Return whether the mesh is equal to one device, in a few words."""
        return "equal to one device" if self.equal else "NOT equal to one device"

    def configuration(self) -> str:
        """Return the mesh and, with pipeline stages, the schedule."""
        mesh, plan = describe_sizes(self.mesh), self.plan
        if not plan.get("schedule"):
            return mesh
        count = counted(plan["num_microbatches"], "microbatch", "microbatches")
        chunks = plan["num_chunks"]
        per_stage = f" and {chunks} chunks per stage" if chunks > 1 else ""
        return f"{mesh}, {plan['schedule']} with {count}{per_stage}"

    def sections(self) -> list[tuple[str, list[Comparison]]]:
        """Return the comparisons in groups, each with a title."""
        updates = counted(self.steps, "update")
        return [
            (f"float64, {updates} of {self.parameters:,} parameters", self.float64),
            (f"precision {self.plan['precision']}", self.own_precision),
            ("the loss as written, float32, one device", self.as_written),
        ]

    def null_leaves_note(self) -> str:
        """Return a line about the leaves whose true gradient is zero; empty without any."""
        if not self.null_leaves:
            return ""
        shown = ", ".join(self.null_leaves[:3]) + (", …" if len(self.null_leaves) > 3 else "")
        leaves = counted(len(self.null_leaves), "leaf", "leaves")
        return f"{leaves} with a true gradient of zero, compared to the global norm: {shown}"

    def comparisons(self) -> list[Comparison]:
        """Return all comparisons."""
        return [*self.float64, *self.own_precision, *self.as_written]

    def failures(self) -> list[Comparison]:
        """Return the comparisons that failed."""
        return [c for c in self.comparisons() if not c.equal]
