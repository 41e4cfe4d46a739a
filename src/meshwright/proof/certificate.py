"""The certificate: what `verify` compared, with the differences, the tolerances and the verdict."""

from typing import Any

from pydantic import Field
from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.config.base import Frozen
from meshwright.mesh.axes import describe_sizes
from meshwright.text.columns import Indented, as_text
from meshwright.text.units import counted


class Comparison(Frozen):
    """One quantity compared with its expected value.

    Attributes:
        what: loss, metrics, gradients, parameters, state or initial values.
        equal: whether every difference is within its tolerance.
        tolerance: the largest difference allowed for the leaf that is named.
        worst: the leaf or step with the largest difference.
        difference: the largest difference; null if it is not finite.
        first_different: the first leaf or step beyond the tolerance; null if there is none.
        first_difference: its difference; null if there is none or if it is not finite.
        how: what was compared with what, and relative to what.
        measured: whether a tolerance is larger because small changes of this model's inputs change
            its results more than usual.
        not_judged: leaves or steps that rounding alone changes by a tenth or more, so that they
            are not compared.
    """

    what: str
    equal: bool
    tolerance: float
    worst: str
    difference: float | None
    first_different: str | None = None
    first_difference: float | None = None
    how: str = ""
    measured: bool = False
    not_judged: list[str] = Field(default_factory=list[str])

    def sentence(self) -> str:
        """Return the comparison in one line."""
        if not self.equal:
            gap, most = self.first_difference, f"more than {self.tolerance:.1e}"
            how_much = "a number that is not finite" if gap is None else f"{gap:.2e}, {most}"
            return f"{self.what}: `{self.first_different}` differs by {how_much}"
        measured = ", as measured" if self.measured else ""
        text = (
            f"{self.what}: equal, largest difference {self.difference:.1e} ({self.worst}), "
            f"tolerance {self.tolerance:.1e}{measured}"
        )
        return text + self._not_judged()

    def _not_judged(self) -> str:
        if not self.not_judged:
            return ""
        shown = ", ".join(self.not_judged[:3]) + (", …" if len(self.not_judged) > 3 else "")
        return f"; not judged, because rounding alone changes it by a tenth or more: {shown}"


class Certificate(Frozen):
    """The result of `verify`: the same run on one device and on the mesh, compared.

    Attributes:
        equal: whether every comparison is within its tolerance.
        mesh: axis sizes; empty for one device.
        plan: the whole plan.
        steps: number of steps compared in float64.
        parameters: number of trained parameters.
        float64: one device against the mesh, all floats being float64: loss and metrics of
            every step, the gradients of the first step, and the parameters and other state of
            the model after the last.
        null_leaves: leaves whose true gradient is zero, so that the computed one is rounding
            noise. They are compared relative to the global norm, and both optimizers get zeros
            for them.
        null_parts: how many elements have a true gradient of zero in leaves of which others do
            not, such as the keys in a fused bias. Both optimizers get zeros for them.
        own_precision: the mesh in the precision of the plan, step by step. One device starts
            each step from the mesh's own values: initial values, loss, gradients, state, and the
            parameters that the optimizer makes of the mesh's gradients.
        as_written: the float64 reference against the loss as its author wrote it, run on one
            device by `nnx.jit` and `nnx.value_and_grad` in float32: loss, gradients and state of
            the first step.
        not_compared: what cannot be compared for this model or optimizer, and why.
        kernels: which parts of the program run as kernels, and why others run as written. In
            float64, their equivalents for any device are compared with the program as written; in
            the plan's precision, the kernels themselves.
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
    null_parts: dict[str, int] = Field(default_factory=dict[str, int])
    own_precision: list[Comparison]
    as_written: list[Comparison]
    not_compared: list[str] = Field(default_factory=list[str])
    kernels: list[str] = Field(default_factory=list[str])
    warnings: list[str] = Field(default_factory=list[str])
    versions: dict[str, str]
    date: str

    def __str__(self) -> str:
        """Return the verdict, and every comparison with its difference and tolerance."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return as_text(Group(self.picture(), Text(f"{versions}, {self.date}")))

    def __repr__(self) -> str:
        return f"Certificate(equal={self.equal}, mesh={self.mesh}, steps={self.steps})"

    def verdict(self) -> str:
        """Return whether the mesh is equal to one device, in a few words."""
        if not self.equal:
            return "NOT equal to one device"
        unjudged = self.not_compared or any(c.not_judged for c in self.comparisons())
        return "equal to one device" + (", as far as can be judged" if unjudged else "")

    def picture(self) -> RenderableType:
        """Return the verdict and every comparison for the terminal."""
        notes = [
            self._null_leaves_note(),
            *(f"not compared: {each}" for each in self.not_compared),
            *(f"kernel: {line}" for line in self.kernels),
        ]
        style = "bold green" if self.equal else "bold red"
        return Group(
            Text.assemble((self.configuration(), "bold"), ": ", (self.verdict(), style)),
            *(line for section in self._sections() for line in _section(*section)),
            *(Indented(note, 2, first=0) for note in notes if note),
            *(Indented(f"warning: {each}", 2, style="yellow", first=0) for each in self.warnings),
        )

    def configuration(self) -> str:
        """Return the mesh and, with pipeline stages, the schedule."""
        mesh, plan = describe_sizes(self.mesh), self.plan
        if not plan.get("schedule"):
            return mesh
        count = counted(plan["num_microbatches"], "microbatch")
        chunks = plan["num_chunks"]
        per_stage = f" and {chunks} chunks per stage" if chunks > 1 else ""
        return f"{mesh}, {plan['schedule']} with {count}{per_stage}"

    def _sections(self) -> list[tuple[str, list[Comparison]]]:
        """Return the comparisons in groups, each with a title."""
        steps = counted(self.steps, "step")
        return [
            (f"float64, {steps} of {self.parameters:,} parameters", self.float64),
            (f"precision {self.plan['precision']}, {steps}, one by one", self.own_precision),
            ("the loss as written, float32, one device", self.as_written),
        ]

    def _null_leaves_note(self) -> str:
        """Return a line about elements whose true gradient is zero; empty without any."""
        if not self.null_leaves and not self.null_parts:
            return ""
        parts = [f"{path} ({count:,} elements)" for path, count in self.null_parts.items()]
        names = [*self.null_leaves, *parts]
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        leaves = counted(len(names), "leaf", "leaves")
        return f"{leaves} with a true gradient of zero, compared to the global norm: {shown}"

    def comparisons(self) -> list[Comparison]:
        """Return all comparisons."""
        return [*self.float64, *self.own_precision, *self.as_written]

    def failures(self) -> list[Comparison]:
        """Return the comparisons that failed."""
        return [c for c in self.comparisons() if not c.equal]


def _section(title: str, comparisons: list[Comparison]) -> list[RenderableType]:
    lines = [Indented(c.sentence(), style="" if c.equal else "red", first=2) for c in comparisons]
    return [Text(title), *lines]
