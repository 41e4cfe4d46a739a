"""The moving average of the weights, kept as a part of the optimizer's state."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.config.argument_checks import check_kind
from meshwright.errors import Setting, UserError

EMA = "ema"
"""The first part of the averages' paths in the optimizer's state."""


class AveragedState(NamedTuple):
    """The state of an optimizer that keeps an average, in float32 or wider."""

    inner: Any
    ema: Any
    count: Any


def with_average(
    optimizer: optax.GradientTransformation, decay: float | None
) -> optax.GradientTransformation:
    """Return an optimizer that also keeps a moving average of the parameters; None keeps none.

    After each step, ``ema = d * ema + (1 - d) * params`` with
    ``d = min(decay, (1 + n) / (10 + n))`` for the step after ``n`` others, so that the initial
    values do not stay in it for long.
    """
    if decay is None:
        return optimizer

    def init(params: Any) -> AveragedState:
        ema = jax.tree.map(lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), params)
        return AveragedState(optimizer.init(params), ema, jnp.zeros((), jnp.int32))

    @functools.wraps(optimizer.update)
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        n = state.count.astype(jnp.float32)
        rate = 1 - jnp.minimum(decay, (1 + n) / (10 + n))
        ema = jax.tree.map(
            lambda old, new: old + rate.astype(old.dtype) * (new.astype(old.dtype) - old),
            state.ema,
            optax.apply_updates(params, updates),
        )
        return updates, AveragedState(inner, ema, state.count + 1)

    return type(optimizer)(init, update)


def check_decay(decay: Any) -> None:
    """Check the decay of an average."""
    if decay is None:
        return
    check_kind("ema_decay", decay, (int, float), "write a number, such as ema_decay=0.999")
    if not 0 < decay < 1:
        raise UserError(
            f"{Setting('training.ema_decay', decay)} is not between 0 and 1",
            why="it is the share of the old average that a step keeps",
            fix=f"write {Setting('training.ema_decay', 0.999)}",
        )


def no_average() -> UserError:
    """Return the error for a run without averages."""
    return UserError(
        "the run keeps no moving average of its weights",
        fix=f"train with {Setting('training.ema_decay', 0.999)}",
    )
