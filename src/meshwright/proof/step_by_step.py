"""Steps compared one by one, each from the mesh's own values, as closely as rounding allows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.evaluate.widen import is_narrow
from meshwright.proof.certificate import Comparison
from meshwright.proof.compare import (
    Gaps,
    Leaves,
    ObservedRun,
    all_finite,
    exact_gaps,
    fetch,
    judge,
    loss_gaps,
    null_leaves,
    rough_gaps,
    where_defined,
    worst_of,
)
from meshwright.proof.mesh_run import MeshStep
from meshwright.proof.reference import OptaxUpdate, Reference
from meshwright.proof.rounding import Rounding, update_tolerances
from meshwright.trees import is_key

SAMPLES = 2
"""How often the inputs are changed to measure how much their rounding matters."""


@dataclass(frozen=True)
class ComparedStep:
    """The first half of a step, up to its gradients, computed twice from the same values.

    ``other`` is another computation that is as good as the expected one; the exact one if None.
    """

    values: Sequence[Any]
    batch: Sequence[Any]
    expected: ObservedRun
    actual: ObservedRun
    wide: Reference
    other: Callable[[], ObservedRun] | None = None

    @cached_property
    def exact(self) -> ObservedRun:
        """The same in float64."""
        with jax.enable_x64(True):
            return self.wide.first_step(widened(self.values), self.batch)

    @cached_property
    def second(self) -> ObservedRun:
        """The other computation."""
        return self.exact if self.other is None else self.other()

    def gaps(self, rounding: Rounding) -> Mapping[str, Gaps]:
        """Return how far apart loss, gradients and state are, each leaf by its path."""
        found = self._gaps(self.expected, self.actual)
        limits = {"loss": rounding.loss, "gradients": rounding.gradients}
        if all(
            gap <= limits.get(what, rounding.gradients)
            for what, gaps in found.items()
            for gap in gaps.values()
        ):
            return found
        again = self._gaps(self.expected, self.actual, self.second)
        return {what: _smaller(found[what], again[what]) for what in found}

    def amplified(self, rounding: Rounding) -> Mapping[str, Gaps]:
        """Return how much rounding may change the results, as measured.

        In float64, the inputs are changed by one rounding error each. What follows from rounding
        grows in the same proportion.
        """
        found: list[Mapping[str, Gaps]] = []
        with jax.enable_x64(True):
            for seed in range(SAMPLES):
                values = perturbed(self.values, rounding.unit, seed)
                batch = perturbed(self.batch, rounding.unit, seed + SAMPLES)
                found.append(self._gaps(self.exact, self.wide.first_step(values, batch)))
        growth = {"loss": rounding.loss / rounding.unit}
        factor = rounding.gradients / rounding.unit
        return {
            what: {
                path: gap * growth.get(what, factor)
                for path, gap in worst_of(sample[what] for sample in found).items()
            }
            for what in found[0]
        }

    def _gaps(
        self, expected: ObservedRun, actual: ObservedRun, exact: ObservedRun | None = None
    ) -> dict[str, Gaps]:
        loss = loss_gaps(expected.losses, actual.losses)
        if exact is not None:
            loss = _smaller(loss, loss_gaps(exact.losses, actual.losses))
        nulls = () if exact is None else null_leaves(self.exact.gradients)
        gradients = None if exact is None else exact.gradients
        written = expected.written | actual.written
        state = where_defined(expected.kept(written), actual.kept(written))
        exact_state = None if exact is None else exact.kept(written)
        return {
            "loss": loss,
            "gradients": rough_gaps(
                expected.gradients, actual.gradients, exact=gradients, nulls=nulls
            ),
            "state": rough_gaps(*state, exact=exact_state),
        }


def compare_steps(steps: Sequence[ComparedStep], rounding: Rounding, how: str) -> list[Comparison]:
    """Compare loss, gradients and state of steps; the gaps of a leaf are the worst of all."""
    gaps = [step.gaps(rounding) for step in steps]
    amplified: list[Mapping[str, Gaps]] = []

    def allowed(what: str) -> Gaps:
        if not amplified:
            amplified.extend(step.amplified(rounding) for step in steps)
        if what == "loss":
            return _numbered(part["loss"] for part in amplified)
        return worst_of(part[what] for part in amplified)

    comparisons: list[Comparison] = []
    for what in ("loss", "gradients", "state"):
        parts = [part[what] for part in gaps]
        found = _numbered(parts) if what == "loss" else worst_of(parts)
        if found:
            tolerance = rounding.loss if what == "loss" else rounding.gradients
            comparisons.append(
                judge(what, found, tolerance, how=how, allowed=lambda what=what: allowed(what))
            )
    return comparisons


def widened(values: Sequence[Any]) -> list[Any]:
    """Return leaf values on the host with floats as float64."""
    return [v.astype(np.promote_types(v.dtype, np.float64)) if is_narrow(v) else v for v in values]


def perturbed(values: Sequence[Any], unit: float, seed: int) -> list[Any]:
    """Return leaf values in float64, each number larger or smaller by a relative ``unit``."""
    random = np.random.default_rng(seed)
    return [
        value * (1 + unit * random.choice((-1.0, 1.0), size=value.shape))
        if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.inexact)
        else value
        for value in widened(values)
    ]


def _numbered(parts: Any) -> Gaps:
    return {f"step {number}": gaps["step 1"] for number, gaps in enumerate(parts, start=1)}


def _smaller(gaps: Gaps, others: Gaps) -> Gaps:
    # `min` returns its first argument if that is NaN, so a NaN is not hidden.
    return {path: min(gap, others[path]) for path, gap in gaps.items()}


LOOKS_AT_LOSS = (
    "parameters in the plan's precision: the optimizer uses the loss itself, and rounding may "
    "change what it decides"
)

WORSE = 4.0
"""How much further the mesh may be from float64 than one device is in the same precision."""

HOW_STEPS = "the mesh against one device, which starts every step from the mesh's own values"
HOW_PARAMETERS = (
    "the mesh's optimizer against optax on one device, from the mesh's gradients and parameters"
)


@dataclass(frozen=True)
class OwnPrecision:
    """What the mesh is compared with in its own precision."""

    narrow: Reference
    wide: Reference
    update: OptaxUpdate
    rounding: Rounding
    initial: Sequence[Any]

    def compare(
        self, steps: Sequence[MeshStep], batches: Sequence[Sequence[Any]]
    ) -> tuple[list[Comparison], list[str]]:
        """Compare every step up to its parameters; also return what is left out, and why."""
        compared: list[ComparedStep] = []
        left_out: list[str] = []
        for step, batch in zip(steps, batches, strict=True):
            one = self._compared(step, batch)
            if not step.is_finite() and not one.expected.is_finite():
                left_out.append(_not_finite("loss and gradients", len(compared), len(steps)))
                break
            compared.append(one)
        comparisons = compare_steps(compared, self.rounding, HOW_STEPS)
        if self.depends_on_loss(steps[0]):
            return comparisons, [*left_out, LOOKS_AT_LOSS]
        parameters, count = self._parameters(steps[: len(compared)])
        if count < len(compared):
            left_out.append(_not_finite("parameters", count, len(steps)))
        return comparisons + parameters, left_out

    def depends_on_loss(self, step: MeshStep) -> bool:
        """Whether the optimizer looks at the loss, which rounding changes from device to device."""
        first = {path: step.before[path] for path in step.clipped}
        return self.update.looks_at_loss(first, self.update.init(first), step.clipped)

    def _compared(self, step: MeshStep, batch: Sequence[Any]) -> ComparedStep:
        values = self._leaf_values(step.before)
        expected = self.narrow.first_step(values, batch, step.loss_scale)
        state = {path: step.after[path] for path in expected.state}
        actual = ObservedRun([step.loss], step.gradients, step.start, state)
        return ComparedStep(values, batch, expected, actual, self.wide)

    def _leaf_values(self, named: Leaves) -> Sequence[Any]:
        """Return fetched values in the order of the leaves, with random keys that are keys."""
        words = fetch(
            {leaf.path: v for leaf, v in zip(self.narrow.leaves, self.initial, strict=True)}
        )
        pairs = [(named[path], value) for path, value in words.items()]
        if all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs):
            # The same list: what one device computes from it is known, or used again.
            return self.initial
        return [
            jax.random.wrap_key_data(jnp.asarray(named[leaf.path]), impl=jax.random.key_impl(first))
            if is_key(first)
            else named[leaf.path]
            for leaf, first in zip(self.narrow.leaves, self.initial, strict=True)
        ]

    def _parameters(self, steps: Sequence[MeshStep]) -> tuple[list[Comparison], int]:
        """Compare what the mesh's optimizer and optax on one device make of the same gradients.

        Also return after how many steps the parameters are finite.
        """
        if not steps:
            return [], 0
        paths = list(steps[0].clipped)
        first = {path: steps[0].before[path] for path in paths}
        moments = self.update.init(first)
        with jax.enable_x64(True):
            exact_moments = self.update.init(_wide(first))
        limits = update_tolerances(
            self.update.program(first, moments, steps[0].clipped),
            {path: value.dtype for path, value in first.items()},
        )
        gaps: list[Gaps] = []
        measured: list[Gaps] = []
        for step in steps:
            before = {path: step.start[path] for path in paths}
            after = {path: step.after[path] for path in paths}
            expected, moments = self.update(before, moments, step.clipped)
            if not all_finite(after) and not all_finite(expected):
                break
            with jax.enable_x64(True):
                exact, exact_moments = self.update(
                    _wide(before), exact_moments, _wide(step.clipped)
                )
            nearest = _smaller(exact_gaps(expected, after), exact_gaps(exact, after))
            gaps.append({path: gap / limits[path] for path, gap in nearest.items()})
            rounded = exact_gaps(exact, expected)
            measured.append({path: WORSE * gap / limits[path] for path, gap in rounded.items()})
        if not gaps:
            return [], 0
        parameters = judge(
            "parameters",
            _scaled(worst_of(gaps), max(limits.values())),
            max(limits.values()),
            how=HOW_PARAMETERS,
            allowed=lambda: _scaled(worst_of(measured), max(limits.values())),
        )
        return [parameters], len(gaps)


def _not_finite(what: str, before: int, steps: int) -> str:
    first = before + 1
    return (
        f"{what} of step{f' {first}' if first == steps else f's {first} to {steps}'} in the plan's "
        "precision: they are not finite, on the mesh and on one device alike"
    )


def _scaled(gaps: Gaps, factor: float) -> Gaps:
    return {path: gap * factor for path, gap in gaps.items()}


def _wide(leaves: Leaves) -> dict[str, np.ndarray[Any, Any]]:
    return dict(zip(leaves, widened(list(leaves.values())), strict=True))
