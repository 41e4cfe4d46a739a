"""Optimizers of a pipeline: each stage's update on its own devices, clipped by a common norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from meshwright.errors import UserError, typed_line
from meshwright.pipeline.by_hand.stage_programs import StagePrograms
from meshwright.trees import PyTree

Scalar = np.generic | NDArray[np.generic]
"""One number on the host."""


def update_stages(
    optimizer: optax.GradientTransformation,
    stages: Sequence[StagePrograms],
    gradients: Sequence[PyTree],
    states: Sequence[PyTree],
    params: Sequence[PyTree],
    clip_norm: float | None,
) -> tuple[list[PyTree], list[PyTree]]:
    """Return (parameters, states) after an update.

    The norm of the gradients of all stages together is limited to ``clip_norm``.
    """
    factor = _clip_factor(gradients, clip_norm)
    updated: list[tuple[PyTree, PyTree]] = []
    for stage, own, state, before in zip(stages, gradients, states, params, strict=True):
        state = jax.device_put(state, stage.everywhere)
        try:
            updated.append(_update(optimizer, own, state, before, factor))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                "the optimizer cannot update the parameters",
                why=typed_line(error),
                fix="pass the states that pipeline.init(optimizer) or the last update returned",
            ) from error
    return [after for after, _ in updated], [state for _, state in updated]


def _clip_factor(gradients: Sequence[PyTree], clip_norm: float | None) -> Scalar:
    if clip_norm is None:
        return np.float32(1)
    squares = [_sum_of_squares(own) for own in gradients]
    norm = np.sqrt(sum(np.asarray(each) for each in squares))
    return np.minimum(1, clip_norm / np.maximum(norm, np.finfo(np.float32).tiny))


# Gradients and states are donated; the user may still read the parameters.
@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _update(
    optimizer: optax.GradientTransformation,
    gradients: PyTree,
    state: PyTree,
    params: PyTree,
    factor: Array,
) -> tuple[PyTree, PyTree]:
    scaled = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
    updates, state = optimizer.update(scaled, state, params)
    return optax.apply_updates(params, updates), copied(state)


def copied(state: PyTree) -> PyTree:
    """Copy an optimizer state: some contain parameters, and donated states need their own."""
    return jax.tree.map(jnp.copy, state)


@jax.jit
def _sum_of_squares(gradients: PyTree) -> Array:
    # At least 32 bits: a sum of squares soon overflows 16 bits.
    squares = [
        jnp.sum(jnp.square(jnp.abs(g).astype(jnp.promote_types(jnp.abs(g).dtype, jnp.float32))))
        for g in jax.tree.leaves(gradients)
    ]
    return sum(squares, start=jnp.zeros((), jnp.float32))
