"""Slots, rows and sums: operations on arrays that ticks are built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.pipeline.aliases import Array, LeafValues, Shaped
from meshwright.trees import PyTree

T = TypeVar("T")


def is_float(value: Shaped) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def zeros_like_shapes(shapes: PyTree) -> PyTree:
    """Return zeros for a pytree of shapes."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def empty_slots(shapes: PyTree, slots: int) -> PyTree:
    """Return buffers with this number of slots, at least one, for values of these shapes."""
    return jax.tree.map(lambda a: jnp.zeros((max(1, slots), *a.shape), a.dtype), shapes)


def read_slot(buffers: T, slot: Array) -> T:
    """Return the values in a slot.

    It is read inside a branch, always the first one. The consumer may need another memory layout,
    and outside of a branch the compiler would convert all slots to that layout in every tick.
    """

    def read(at: Array | int) -> PyTree:
        values = jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, at, 0, keepdims=False), buffers)
        # Branches that end in arrays divided in different ways are refused by the compiler.
        return lax.optimization_barrier(values)

    if not jax.tree.leaves(buffers):
        return buffers
    return lax.cond(slot >= 0, lambda: read(slot), lambda: read(0))


def write_slot(buffers: T, values: T, slot: Array) -> T:
    """Write values into a slot; a negative slot changes nothing.

    In a separate loop, so that values take the memory layout of the slots, not the other way round.
    """

    def write(now: T) -> T:
        return jax.tree.map(
            lambda b, v: lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), slot, 0),
            now,
            values,
        )

    return when(slot >= 0, write, buffers)


def when(needed: Array, update: Callable[[T], T], values: T) -> T:
    """Return ``update(values)`` if needed, else the values.

    It is a loop of zero or one iterations: compilers update the carry of a loop in place, but copy
    the results of a branch. The buffers may have many gigabytes, in every tick.
    """
    return looped(needed, update, values)[1]


def looped(needed: Array, update: Callable[[T], T], values: T) -> tuple[Array, T]:
    """Like `when`, but also return a flag that is always false, available after the loop."""

    def iteration(carry: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros_like(carry[0]), update(carry[1])

    return lax.while_loop(lambda carry: carry[0], iteration, (needed, values))


def add_row(stack: Array, value: Array, at: Array) -> Array:
    """Return a stack with a value added to one of its rows."""
    if stack.shape[0] == 1:
        return stack + value[None]
    before = lax.dynamic_index_in_dim(stack, at, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(stack, before + value, at, 0)


def added(sums: LeafValues, gradients: LeafValues, weight: Array | None) -> LeafValues:
    """Return sums with gradients added, times the microbatch's weight if there is one."""
    return {n: total + times(gradients[n], weight) for n, total in sums.items()}


def times(gradient: Array, weight: Array | None) -> Array:
    """Return a gradient times the microbatch's weight if there is one."""
    return gradient if weight is None else gradient * weight.astype(gradient.dtype)
