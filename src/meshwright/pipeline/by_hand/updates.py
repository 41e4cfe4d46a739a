"""Optimizers of a pipeline: each stage's update on its own devices, clipped by a common norm."""

from __future__ import annotations

from collections.abc import Sequence

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


class Updates:
    """Runs an optimizer on each stage.

    Args:
        stages: the stages, whose devices hold their share of the optimizer's state.
    """

    def __init__(self, stages: Sequence[StagePrograms]) -> None:
        self._stages = stages
        self._squares = jax.jit(_sum_of_squares)
        # Gradients and states are donated; the user may still read the parameters.
        self._step = jax.jit(_update, static_argnums=0, donate_argnums=(1, 2))

    def init(
        self, optimizer: optax.GradientTransformation, params: Sequence[PyTree]
    ) -> list[PyTree]:
        """Return the optimizer's state for each stage, on its devices."""
        pairs = zip(self._stages, params, strict=True)

        def start(stage_params: PyTree) -> PyTree:
            return _copied(optimizer.init(stage_params))

        return [jax.jit(start, out_shardings=stage.everywhere)(own) for stage, own in pairs]

    def factor(self, gradients: Sequence[PyTree], clip_norm: float | None) -> Scalar:
        """Return the factor that limits the norm of all gradients together to ``clip_norm``."""
        if clip_norm is None:
            return np.float32(1)
        squares = [self._squares(own) for own in gradients]
        norm = np.sqrt(sum(np.asarray(each) for each in squares))
        return np.minimum(1, clip_norm / np.maximum(norm, np.finfo(np.float32).tiny))

    def apply(
        self,
        optimizer: optax.GradientTransformation,
        gradients: Sequence[PyTree],
        states: Sequence[PyTree],
        params: Sequence[PyTree],
        factor: Scalar,
    ) -> tuple[list[PyTree], list[PyTree]]:
        """Return (parameters, states) after an update."""
        updated: list[tuple[PyTree, PyTree]] = []
        each = zip(self._stages, gradients, states, params, strict=True)
        for stage, own, state, before in each:
            state = jax.device_put(state, stage.everywhere)
            try:
                updated.append(self._step(optimizer, own, state, before, factor))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    "the optimizer cannot update the parameters",
                    why=typed_line(error),
                    fix="pass the states that pipeline.init(optimizer) or the last update returned",
                ) from error
        return [after for after, _ in updated], [state for _, state in updated]


def _update(
    optimizer: optax.GradientTransformation,
    gradients: PyTree,
    state: PyTree,
    params: PyTree,
    factor: Array,
) -> tuple[PyTree, PyTree]:
    scaled = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
    updates, state = optimizer.update(scaled, state, params)
    return optax.apply_updates(params, updates), _copied(state)


def _copied(state: PyTree) -> PyTree:
    # Some optimizer states contain parameters; donated states need their own copies.
    return jax.tree.map(jnp.copy, state)


def _sum_of_squares(gradients: PyTree) -> Array:
    # At least 32 bits: a sum of squares soon overflows 16 bits.
    squares = [
        jnp.sum(jnp.square(jnp.abs(g).astype(jnp.promote_types(jnp.abs(g).dtype, jnp.float32))))
        for g in jax.tree.leaves(gradients)
    ]
    return sum(squares, start=jnp.zeros((), jnp.float32))
