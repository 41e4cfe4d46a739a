"""Checks of arguments that several public functions take."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.config.base import shorten
from meshwright.errors import UserError


def check_count(name: str, count: Any) -> None:
    """Refuse anything but a whole number of at least 1."""
    whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not whole or count < 1:
        raise UserError(
            f"{name}={count!r} is not valid",
            why="it is less than 1" if whole else f"it is of type {type(count).__name__}",
            fix=f"write {name} as a whole number, 1 or more",
        )


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is not an optax transformation, and say what to write instead."""
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return
    if isinstance(optimizer, int | float):
        fix = f"write optimizer=optax.adamw({optimizer}) if it is a learning rate"
    elif isinstance(optimizer, str):
        fix = f"write optimizer=optax.{optimizer}(…) if it is the name of one"
    elif callable(optimizer):
        fix = f"call it: optimizer={getattr(optimizer, '__name__', 'optimizer')}(…)"
    else:
        fix = "write one such as optax.adamw(3e-4)"
    raise UserError(
        f"the optimizer is {shorten(optimizer)}, of type {type(optimizer).__name__}",
        why="it must be an optax transformation, with init and update",
        fix=fix,
    )


def check_clip_norm(norm: Any) -> None:
    """Refuse what is not a positive number."""
    if norm is None:
        return
    if not isinstance(norm, int | float | np.number):
        raise UserError(
            f"clip_norm={norm!r} is not valid",
            why=f"it is of type {type(norm).__name__}",
            fix="write clip_norm=1.0, or None for no clipping",
        )
    if not norm > 0:
        raise UserError(
            f"clip_norm={norm} would stop all learning",
            why="gradients are scaled down to this norm",
            fix="write clip_norm=1.0, or None for no clipping",
        )
