"""Optimizers of a pipeline: each stage's update on its own devices, clipped by a common norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.errors import UserError, first_line
from meshwright.pipeline.separate import Stage


class Updates:
    """Runs an optimizer on each stage.

    Args:
        stages: the stages, whose devices hold their share of the optimizer's state.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._squares = jax.jit(_sum_of_squares)
        # Gradients and states are used up; parameters may still be read by whoever has them.
        self._step = jax.jit(_update, static_argnums=0, donate_argnums=(1, 2))

    def init(self, optimizer: Any, params: Sequence[Any]) -> list[Any]:
        """Return the optimizer's state for each stage, on its devices."""
        pairs = zip(self._stages, params, strict=True)

        def start(own: Any) -> Any:
            return _apart(optimizer.init(own))

        return [jax.jit(start, out_shardings=stage.everywhere)(own) for stage, own in pairs]

    def factor(self, gradients: Sequence[Any], clip_norm: float | None) -> Any:
        """Return what gradients are multiplied by, so that their common norm is at most this."""
        if clip_norm is None:
            return np.float32(1)
        squares = [self._squares(own) for own in gradients]
        norm = np.sqrt(sum(np.asarray(each) for each in squares))
        return np.minimum(1, clip_norm / np.maximum(norm, np.finfo(np.float32).tiny))

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        states: Sequence[Any],
        params: Sequence[Any],
        factor: Any,
    ) -> tuple[list[Any], list[Any]]:
        """Return (parameters, states) after an update."""
        found: list[Any] = []
        each = zip(self._stages, gradients, states, params, strict=True)
        for stage, own, state, before in each:
            state = jax.device_put(state, stage.everywhere)
            try:
                found.append(self._step(optimizer, own, state, before, factor))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise UserError(
                    "the optimizer cannot update the parameters",
                    why=first_line(error, with_kind=True),
                    fix="give the states that pipeline.init(optimizer) or the last update returned",
                ) from error
        return [after for after, _ in found], [state for _, state in found]


def _update(optimizer: Any, gradients: Any, state: Any, params: Any, factor: Any) -> Any:
    scaled = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
    updates, state = optimizer.update(scaled, state, params)
    return optax.apply_updates(params, updates), _apart(state)


def _apart(state: Any) -> Any:
    # Some optimizers remember parameters; used up with the state, they must be arrays of its own.
    return jax.tree.map(jnp.copy, state)


def _sum_of_squares(gradients: Any) -> Any:
    # At least 32 bits: a sum of squares leaves the range of 16 bits soon.
    squares = [
        jnp.sum(jnp.square(jnp.abs(g).astype(jnp.promote_types(jnp.abs(g).dtype, jnp.float32))))
        for g in jax.tree.leaves(gradients)
    ]
    return sum(squares, start=jnp.zeros((), jnp.float32))
