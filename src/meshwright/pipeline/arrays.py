"""Slots, rows and sums: the few operations on arrays that every tick is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def is_float(value: Any) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def empty_slots(shapes: Sequence[Any], slots: int) -> list[Any]:
    """Return arrays with so many slots, at least one, for values of these shapes."""
    return [jnp.zeros((max(1, slots), *a.shape), a.dtype) for a in shapes]


def read_slot(buffers: list[Any], slot: Array) -> list[Any]:
    """Return what is in a slot; a negative slot gives anything."""
    at = jnp.maximum(slot, 0)
    return [lax.dynamic_index_in_dim(b, at, 0, keepdims=False) for b in buffers]


def write_slot(buffers: list[Any], values: Sequence[Any], slot: Array) -> list[Any]:
    """Write values into a slot; a negative slot changes nothing."""
    at = jnp.maximum(slot, 0)
    return [
        lax.dynamic_update_index_in_dim(
            b, jnp.where(slot >= 0, v, lax.dynamic_index_in_dim(b, at, 0, keepdims=False)), at, 0
        )
        for b, v in zip(buffers, values, strict=True)
    ]


def add_row(stack: Any, value: Any, at: Array | int) -> Any:
    """Return a stack with a value added to one of its rows."""
    before = lax.dynamic_index_in_dim(stack, at, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(stack, before + value, at, 0)


def placed(values: Sequence[Any], numbers: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return values with those of these numbers replaced."""
    found = dict(zip(numbers, new, strict=True))
    return [found.get(number, value) for number, value in enumerate(values)]


def added(sums: Sequence[Any], gradients: Sequence[Any], tail: list[Any]) -> list[Any]:
    """Return sums with gradients added, times the weight in ``tail`` if there is one."""
    return [s + times(g, tail) for s, g in zip(sums, gradients, strict=True)]


def times(gradient: Any, tail: list[Any]) -> Any:
    """Return a gradient times the weight in ``tail`` if there is one."""
    return gradient * tail[0].astype(gradient.dtype) if tail else gradient
