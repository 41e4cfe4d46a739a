"""The mesh in the plan's own precision, update by update, each from the mesh's own values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.proof.certificate import Comparison
from meshwright.proof.compare import Gaps, exact_gaps, judge, worst_of
from meshwright.proof.mesh_run import MeshUpdate
from meshwright.proof.observed import Leaves, ObservedRun, fetch
from meshwright.proof.one_update import ComparedUpdate, Rounding, compare_updates, widened
from meshwright.proof.reference import OptaxUpdate, Reference
from meshwright.proof.rounding import update_tolerances
from meshwright.trees import is_key

WORSE = 4.0
"""How much further the mesh may be from float64 than one device is in the same precision."""

HOW_UPDATES = "the mesh against one device, which starts every update from the mesh's own values"
HOW_PARAMETERS = (
    "the mesh's optimizer against optax on one device, from the mesh's gradients and parameters"
)


@dataclass(frozen=True)
class OwnPrecision:
    """What the mesh is compared with in its own precision.

    Attributes:
        narrow: the reference in the plan's precision.
        wide: the reference in float64.
        update: the optimizer on one device.
        rounding: how much rounding may change loss and gradients.
        initial: the model's initial leaf values, whose order and random keys are used.
    """

    narrow: Reference
    wide: Reference
    update: OptaxUpdate
    rounding: Rounding
    initial: Sequence[Any]

    def compare(
        self, updates: Sequence[MeshUpdate], batches: Sequence[Sequence[Any]]
    ) -> list[Comparison]:
        """Compare loss, gradients, state and parameters of every update."""
        compared = [
            self._compared(update, batch) for update, batch in zip(updates, batches, strict=True)
        ]
        comparisons = compare_updates(compared, self.rounding, HOW_UPDATES)
        if not self.depends_on_loss(updates[0]):
            comparisons.append(self._parameters(updates))
        return comparisons

    def depends_on_loss(self, update: MeshUpdate) -> bool:
        """Whether the optimizer looks at the loss, which rounding changes from device to device."""
        first = {path: update.before[path] for path in update.clipped}
        return self.update.looks_at_loss(first, self.update.init(first), update.clipped)

    def _compared(self, update: MeshUpdate, batch: Sequence[Any]) -> ComparedUpdate:
        values = self._leaf_values(update.before)
        expected = self.narrow.first_update(values, batch, update.loss_scale)
        state = {path: update.after[path] for path in expected.state}
        actual = ObservedRun([update.loss], update.gradients, update.start, state)
        return ComparedUpdate(values, batch, expected, actual, self.wide)

    def _leaf_values(self, named: Leaves) -> Sequence[Any]:
        """Return fetched values in the order of the leaves, with random keys that are keys."""
        words = fetch(
            {leaf.path: v for leaf, v in zip(self.narrow.leaves, self.initial, strict=True)}
        )
        if all(_same_bits(named[path], value) for path, value in words.items()):
            # The same list: what one device computes from it is known, or used again.
            return self.initial
        return [
            jax.random.wrap_key_data(jnp.asarray(named[leaf.path]), impl=jax.random.key_impl(first))
            if is_key(first)
            else named[leaf.path]
            for leaf, first in zip(self.narrow.leaves, self.initial, strict=True)
        ]

    def _parameters(self, updates: Sequence[MeshUpdate]) -> Comparison:
        """Compare what the mesh's optimizer and optax on one device make of the same gradients."""
        paths = list(updates[0].clipped)
        first = {path: updates[0].before[path] for path in paths}
        moments = self.update.init(first)
        with jax.enable_x64(True):
            exact_moments = self.update.init(_wide(first))
        limits = update_tolerances(
            self.update.program(first, moments, updates[0].clipped),
            {path: value.dtype for path, value in first.items()},
        )
        gaps: list[Gaps] = []
        measured: list[Gaps] = []
        for update in updates:
            before = {path: update.start[path] for path in paths}
            after = {path: update.after[path] for path in paths}
            expected, moments = self.update(before, moments, update.clipped)
            with jax.enable_x64(True):
                exact, exact_moments = self.update(
                    _wide(before), exact_moments, _wide(update.clipped)
                )
            gaps.append(_nearest(after, expected, exact, limits))
            rounded = exact_gaps(exact, expected)
            measured.append({path: WORSE * gap / limits[path] for path, gap in rounded.items()})
        return judge(
            "parameters",
            _scaled(worst_of(gaps), max(limits.values())),
            max(limits.values()),
            how=HOW_PARAMETERS,
            allowed=lambda: _scaled(worst_of(measured), max(limits.values())),
        )


def _nearest(after: Leaves, expected: Leaves, exact: Leaves, limits: Mapping[str, float]) -> Gaps:
    """Return how far each leaf is from one device or from float64, in units of its tolerance."""
    near, far = exact_gaps(expected, after), exact_gaps(exact, after)
    # `min` returns its first argument if that is NaN, so a NaN is not hidden.
    return {path: min(near[path], far[path]) / limits[path] for path in near}


def _same_bits(value: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return value.dtype == other.dtype and value.tobytes() == other.tobytes()


def _scaled(gaps: Gaps, factor: float) -> Gaps:
    return {path: gap * factor for path, gap in gaps.items()}


def _wide(leaves: Leaves) -> dict[str, np.ndarray[Any, Any]]:
    return dict(zip(leaves, widened(list(leaves.values())), strict=True))
