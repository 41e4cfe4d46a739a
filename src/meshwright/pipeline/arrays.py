"""Slots, rows and sums: the few operations on arrays that every tick is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array, lax

T = TypeVar("T")


def is_float(value: Any) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def empty_slots(shapes: Sequence[Any], slots: int) -> list[Any]:
    """Return arrays with so many slots, at least one, for values of these shapes."""
    return [jnp.zeros((max(1, slots), *a.shape), a.dtype) for a in shapes]


def read_slot(buffers: list[Any], slot: Array) -> list[Any]:
    """Return what is in a slot.

    Read in a branch, which is always the first: who reads a slot may want it laid out in memory
    in another way, and outside of a branch compilers give all slots that layout, tick by tick.
    """

    def read(at: Array | int) -> list[Any]:
        values = [lax.dynamic_index_in_dim(b, at, 0, keepdims=False) for b in buffers]
        # Branches that end in arrays divided in different ways are refused by the compiler.
        return lax.optimization_barrier(values)

    return lax.cond(slot >= 0, lambda: read(slot), lambda: read(0)) if buffers else []


def write_slot(buffers: list[Any], values: Sequence[Any], slot: Array) -> list[Any]:
    """Write values into a slot; a negative slot changes nothing.

    In a loop of its own, so that values are laid out in memory as slots are, not slots as values.
    """

    def write(now: list[Any]) -> list[Any]:
        return [
            lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), slot, 0)
            for b, v in zip(now, values, strict=True)
        ]

    return when(slot >= 0, write, buffers)


def when(needed: Array, update: Callable[[T], T], values: T) -> T:
    """Return updated values where there is something to do, else what they are.

    Written as a loop of no or one turn: compilers change what a loop carries in place, and copy
    what a branch returns. Buffers of many gigabytes go through here in every tick.
    """
    return looped(needed, update, values)[1]


def looped(needed: Array, update: Callable[[T], T], values: T) -> tuple[Array, T]:
    """Do as `when` does; with a truth value that is always false, once the loop is over."""

    def turn(carry: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros_like(carry[0]), update(carry[1])

    return lax.while_loop(lambda carry: carry[0], turn, (needed, values))


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
