"""Comparing loss, gradients and state of single updates, as closely as rounding allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from meshwright.program.evaluate.widen import is_narrow
from meshwright.proof.certificate import Comparison
from meshwright.proof.compare import Gaps, judge, loss_gaps, null_leaves, rough_gaps, worst_of
from meshwright.proof.observed import ObservedRun
from meshwright.proof.reference import Reference

SAMPLES = 2
"""How often the inputs are changed to measure how much their rounding matters."""


@dataclass(frozen=True)
class Rounding:
    """How much rounding changes what a program computes.

    Attributes:
        loss: tolerance of the loss.
        gradients: tolerance of gradients and state.
        unit: the largest error of one rounding.
    """

    loss: float
    gradients: float
    unit: float


@dataclass(frozen=True)
class ComparedUpdate:
    """The first half of an update, up to its gradients, computed twice from the same values.

    Attributes:
        values: the model's leaf values before it.
        batch: its batch.
        expected: what is expected.
        actual: what is compared with it.
        wide: the float64 reference.
        other: another computation that is as good as the expected one; the exact one if None.
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
            return self.wide.first_update(widened(self.values), self.batch)

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
                found.append(self._gaps(self.exact, self.wide.first_update(values, batch)))
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
        state = None if exact is None else exact.kept(written)
        return {
            "loss": loss,
            "gradients": rough_gaps(
                expected.gradients, actual.gradients, exact=gradients, nulls=nulls
            ),
            "state": rough_gaps(expected.kept(written), actual.kept(written), exact=state),
        }


def compare_updates(
    updates: Sequence[ComparedUpdate], rounding: Rounding, how: str
) -> list[Comparison]:
    """Compare loss, gradients and state of updates; the gaps of a leaf are the worst of all."""
    gaps = [update.gaps(rounding) for update in updates]
    amplified: list[Mapping[str, Gaps]] = []

    def allowed(what: str) -> Gaps:
        if not amplified:
            amplified.extend(update.amplified(rounding) for update in updates)
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
    return {f"update {number}": gaps["update 1"] for number, gaps in enumerate(parts, start=1)}


def _smaller(gaps: Gaps, others: Gaps) -> Gaps:
    # `min` returns its first argument if that is NaN, so a NaN is not hidden.
    return {path: min(gap, others[path]) for path, gap in gaps.items()}
