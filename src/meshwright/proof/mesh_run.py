"""Training on the mesh while recording losses, gradients and the final values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.proof.observed import Leaves, ObservedRun, fetch, withhold
from meshwright.step.assemble import Assembled
from meshwright.step.scaler import SMALLEST_SCALE
from meshwright.step.state import TrainState
from meshwright.step.train_step import Metrics


class RecordedGradients(NamedTuple):
    """The state of `recording_gradients`: the gradients of the latest update."""

    gradients: Any


_RECORDED = "0.gradients."
"""The path prefix of the gradients in the optimizer state: recording is the first in a chain."""


def recording_gradients(
    optimizer: optax.GradientTransformation, withheld: Collection[str] = ()
) -> optax.GradientTransformation:
    """Return the optimizer with the gradients of each update recorded in its state.

    They are the gradients that the compiled step itself passed to its optimizer. Those at the
    paths ``withheld`` are recorded as well, but the optimizer gets zeros.
    """

    def init(params: Any) -> RecordedGradients:
        return RecordedGradients(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RecordedGradients]:
        del state, params
        return withhold(updates, withheld), RecordedGradients(updates)

    return optax.chain(optax.GradientTransformation(init, update), optimizer)


def train_on_mesh(
    assembled: Assembled,
    state: TrainState,
    batches: Sequence[Sequence[Any]],
    clip_norm: float | None,
) -> ObservedRun:
    """Train with a step whose optimizer is from `recording_gradients`; the state is donated."""
    losses: list[float] = []
    gradients: Leaves = {}
    scale = 1.0
    for number, batch in enumerate(batches):
        state, metrics, used_scale = _update(assembled, state, batch)
        losses.append(float(metrics["loss"]))
        if number == 0:
            scale, factor = used_scale, _clip_factor(float(metrics["grad_norm"]), clip_norm)
            gradients = {
                path: g / factor for path, g in recorded_gradients(assembled, state).items()
            }
    values = canonical_values(assembled, state)
    trained = {leaf.path for leaf in assembled.traced.layout.leaves if leaf.role == "param"}
    return ObservedRun(
        losses,
        gradients,
        parameters={path: value for path, value in values.items() if path in trained},
        state={path: value for path, value in values.items() if path not in trained},
        loss_scale=scale,
    )


def canonical_values(assembled: Assembled, state: TrainState) -> Leaves:
    """Return the model's leaves by canonical path."""
    layout = assembled.traced.layout
    values = assembled.step.leaf_values(state)
    # Fetch stacks before splitting them: slicing on the host compiles nothing.
    fetched = fetch({step.leaf.path: v for step, v in zip(layout.step_leaves, values, strict=True)})
    canonical = layout.to_canonical([fetched[step.leaf.path] for step in layout.step_leaves])
    return {leaf.path: value for leaf, value in zip(layout.leaves, canonical, strict=True)}


def recorded_gradients(assembled: Assembled, state: TrainState) -> Leaves:
    """Return the gradients of the latest update by canonical path."""
    layout = assembled.traced.layout
    pairs = zip(assembled.step.optimizer.leaves, state.optimizer, strict=True)
    recorded = fetch({leaf.path: value for leaf, value in pairs if leaf.path.startswith(_RECORDED)})
    gradients: dict[str, Any] = {}
    for step in layout.select("param"):
        paths = [layout.leaves[source].path for source in step.sources]
        stack = recorded.get(_RECORDED + step.leaf.path)
        if step.stacked and stack is not None:
            gradients |= dict(zip(paths, step.split(stack), strict=True))
        else:
            gradients |= {path: recorded[_RECORDED + path] for path in paths}
    return gradients


def _update(
    assembled: Assembled, state: TrainState, batch: Sequence[Any]
) -> tuple[TrainState, Metrics, float]:
    """Run one update and return the loss scale it used.

    fp16 starts with a large scale. An update whose gradients overflow only halves it, so the update
    is repeated until it succeeds.
    """
    placed = assembled.put_batch(batch)
    while True:
        scale, skipped = _scaling(state)
        state, metrics = assembled.step(state, placed)
        if _scaling(state)[1] == skipped or scale <= SMALLEST_SCALE:
            return state, metrics, scale


def _scaling(state: TrainState) -> tuple[float, int]:
    if state.loss_scale is None:
        return 1.0, 0
    return float(state.loss_scale.scale), int(state.loss_scale.skipped)


def _clip_factor(norm: float, clip_norm: float | None) -> float:
    return 1.0 if clip_norm is None or not norm > clip_norm else clip_norm / norm
