"""Training on the mesh while recording losses, gradients and the final values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.proof.compare import Leaves, Masks, ObservedRun, fetch
from meshwright.proof.nulls import withhold
from meshwright.step.assemble import Assembled
from meshwright.step.state import SMALLEST_SCALE, TrainState
from meshwright.step.train_step import Metrics


class RecordedGradients(NamedTuple):
    """State of `recording_gradients`: those of the latest step, and its parameters if recorded."""

    gradients: Any
    params: Any = None


_GRADIENTS, _PARAMS = "0.gradients.", "0.params."
"""Path prefixes in the optimizer state: recording is the first in a chain."""


def recording_gradients(
    optimizer: optax.GradientTransformation,
    withheld: Masks | None = None,
    *,
    params_too: bool = False,
) -> optax.GradientTransformation:
    """Return the optimizer with the gradients of each step recorded in its state.

    They are the gradients that the compiled step itself passed to its optimizer. Elements of
    ``withheld`` are recorded as well, but the optimizer gets zeros. ``params_too`` also records the
    parameters that it updates, which differ from those before the step if the model writes to
    them.
    """

    def init(params: Any) -> RecordedGradients:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return RecordedGradients(zeros, zeros if params_too else None)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RecordedGradients]:
        del state
        recorded = RecordedGradients(updates, params if params_too else None)
        return withhold(updates, withheld or {}), recorded

    return optax.chain(optax.GradientTransformation(init, update), optimizer)


@dataclass(frozen=True)
class MeshStep:
    """One step on the mesh.

    ``start`` are the parameters that the optimizer got, ``gradients`` are from before clipping, and
    ``clipped`` as the optimizer got them.
    """

    before: Leaves
    after: Leaves
    start: Leaves
    loss: float
    gradients: Leaves
    clipped: Leaves
    loss_scale: float
    metrics: Mapping[str, float]

    def is_finite(self) -> bool:
        """Whether the loss and the gradients are."""
        return math.isfinite(self.loss) and math.isfinite(self.metrics["grad_norm"])


def steps_on_mesh(
    assembled: Assembled,
    state: TrainState,
    batches: Sequence[Sequence[Any]],
    clip_norm: float | None,
) -> Iterator[MeshStep]:
    """Train with a step whose optimizer is from `recording_gradients`; the state is donated."""
    before = canonical_values(assembled, state)
    for batch in batches:
        state, metrics, scale = _step(assembled, state, batch)
        clipped = recorded(assembled, state, _GRADIENTS)
        start = recorded(assembled, state, _PARAMS) or {path: before[path] for path in clipped}
        norm = float(metrics["grad_norm"])
        factor = 1.0 if clip_norm is None or not norm > clip_norm else clip_norm / norm
        after = canonical_values(assembled, state)
        yield MeshStep(
            before,
            after,
            start,
            loss=float(metrics["loss"]),
            gradients={path: g / factor for path, g in clipped.items()},
            clipped=clipped,
            loss_scale=scale,
            metrics={name: float(value) for name, value in metrics.items()},
        )
        before = after


def train_on_mesh(
    assembled: Assembled,
    state: TrainState,
    batches: Sequence[Sequence[Any]],
    clip_norm: float | None,
) -> ObservedRun:
    """Train like `steps_on_mesh`, and return the first gradients and the last values."""
    steps = list(steps_on_mesh(assembled, state, batches, clip_norm))
    trained = {leaf.path for leaf in assembled.traced.layout.leaves if leaf.role == "param"}
    values = steps[-1].after
    return ObservedRun(
        [step.loss for step in steps],
        steps[0].gradients,
        parameters={path: value for path, value in values.items() if path in trained},
        state={path: value for path, value in values.items() if path not in trained},
        metrics=[step.metrics for step in steps],
    )


def canonical_values(assembled: Assembled, state: TrainState) -> Leaves:
    """Return the model's leaves by canonical path."""
    layout = assembled.traced.layout
    values = assembled.step.leaf_values(state)
    # Fetch stacks before splitting them: slicing on the host compiles nothing.
    fetched = fetch({step.leaf.path: v for step, v in zip(layout.step_leaves, values, strict=True)})
    canonical = layout.to_canonical([fetched[step.leaf.path] for step in layout.step_leaves])
    return {leaf.path: value for leaf, value in zip(layout.leaves, canonical, strict=True)}


def recorded(assembled: Assembled, state: TrainState, prefix: str = _GRADIENTS) -> Leaves:
    """Return what was recorded of the latest step by canonical path; empty if nothing was."""
    layout = assembled.traced.layout
    pairs = zip(assembled.step.optimizer.leaves, state.optimizer, strict=True)
    found = fetch({leaf.path: value for leaf, value in pairs if leaf.path.startswith(prefix)})
    values: dict[str, Any] = {}
    for step in layout.select("param") if found else ():
        paths = [layout.leaves[source].path for source in step.sources]
        stack = found.get(prefix + step.leaf.path)
        if step.stacked and stack is not None:
            values |= dict(zip(paths, step.split(stack), strict=True))
        else:
            values |= {path: found[prefix + path] for path in paths}
    return values


def _step(
    assembled: Assembled, state: TrainState, batch: Sequence[Any]
) -> tuple[TrainState, Metrics, float]:
    """Run one step and return the loss scale it used.

    fp16 starts with a large scale. A step whose gradients overflow only halves it, so the step
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
