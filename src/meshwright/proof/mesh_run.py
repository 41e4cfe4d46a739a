"""Watching a step train on its mesh, the gradients its optimizer is given included."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.proof.observed import Leaves, Observed, fetch, withhold
from meshwright.step.assemble import Assembled
from meshwright.step.scaler import SMALLEST_SCALE
from meshwright.step.state import TrainState
from meshwright.step.train_step import Metrics


class Noted(NamedTuple):
    """The state of `noting`: the gradients of the latest update."""

    gradients: Any


_NOTED = "0.gradients."
"""Where a step's optimizer keeps them: `noting` is the first of two in a chain."""


def noting(
    optimizer: optax.GradientTransformation, withheld: Collection[str] = ()
) -> optax.GradientTransformation:
    """Return the same optimizer, which also keeps the gradients it is given.

    What is compared is thus what the compiled step itself computed and handed to its optimizer;
    the gradients at the paths ``withheld`` are kept, too, but go no further.
    """

    def init(params: Any) -> Noted:
        return Noted(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Noted]:
        del state, params
        return withhold(updates, withheld), Noted(updates)

    return optax.chain(optax.GradientTransformation(init, update), optimizer)


def train_on_mesh(
    assembled: Assembled,
    state: TrainState,
    batches: Sequence[Sequence[Any]],
    clip_norm: float | None,
) -> Observed:
    """Train with a step whose optimizer is `noting`; the state is consumed."""
    losses: list[float] = []
    gradients: Leaves = {}
    scale = 1.0
    for number, batch in enumerate(batches):
        state, metrics, used = _apply(assembled, state, batch)
        losses.append(float(metrics["loss"]))
        if number == 0:
            scale, factor = used, _clipped_by(float(metrics["grad_norm"]), clip_norm)
            gradients = {path: g / factor for path, g in noted_gradients(assembled, state).items()}
    values = canonical_values(assembled, state)
    trained = {leaf.path for leaf in assembled.traced.layout.leaves if leaf.role == "param"}
    return Observed(
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
    # Fetched first and taken apart on the host, where slicing compiles nothing.
    fetched = fetch({step.leaf.path: v for step, v in zip(layout.step_leaves, values, strict=True)})
    found = layout.to_canonical([fetched[step.leaf.path] for step in layout.step_leaves])
    return {leaf.path: value for leaf, value in zip(layout.leaves, found, strict=True)}


def noted_gradients(assembled: Assembled, state: TrainState) -> Leaves:
    """Return, by canonical path, the gradients the optimizer got in the latest update."""
    layout = assembled.traced.layout
    pairs = zip(assembled.step.optimizer.leaves, state.optimizer, strict=True)
    noted = fetch({leaf.path: value for leaf, value in pairs if leaf.path.startswith(_NOTED)})
    found: dict[str, Any] = {}
    for step in layout.select("param"):
        paths = [layout.leaves[source].path for source in step.sources]
        stack = noted.get(_NOTED + step.leaf.path)
        if step.stacked and stack is not None:
            found |= dict(zip(paths, step.split(stack), strict=True))
        else:
            found |= {path: noted[_NOTED + path] for path in paths}
    return found


def _apply(
    assembled: Assembled, state: TrainState, batch: Sequence[Any]
) -> tuple[TrainState, Metrics, float]:
    """Update once, and return the loss scale that was used.

    fp16 starts with a large scale and halves it as long as gradients overflow, which leaves
    everything else as it was.
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


def _clipped_by(norm: float, clip_norm: float | None) -> float:
    return 1.0 if clip_norm is None or not norm > clip_norm else clip_norm / norm
