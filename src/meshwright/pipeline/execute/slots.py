"""Messages between stages, and the slots, rows and sums in which ticks keep arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from meshwright.pipeline.divide.stages import BlockRow, LeafValues, Losses
from meshwright.trees import PyTree, TreeDef

T = TypeVar("T")


def is_float(value: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def zeros_like_shapes(shapes: PyTree) -> PyTree:
    """Return zeros for a pytree of shapes."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def empty_slots(shapes: PyTree, slots: int) -> PyTree:
    """Return buffers with this number of slots, at least one, for values of these shapes."""
    return jax.tree.map(lambda a: jnp.zeros((max(1, slots), *a.shape), a.dtype), shapes)


def read_slot(buffers: T, slot: Array) -> T:
    """Return the values in a slot."""

    def read(at: Array | int) -> PyTree:
        return jax.tree.map(lambda b: _row(b, at), buffers)

    if pins_layouts() or not jax.tree.leaves(buffers):
        return jax.tree.map(_pinned, read(slot))
    # The compiler refuses branches whose results are sharded differently.
    barrier = lax.optimization_barrier
    return lax.cond(slot >= 0, lambda: barrier(read(slot)), lambda: barrier(read(0)))


def write_slot(buffers: T, values: T, slot: Array) -> T:
    """Write values into a slot."""
    return _write(buffers, values, slot) if pins_layouts() else keep(buffers, values, slot)


def keep(buffers: T, values: T, slot: Array) -> T:
    """Write values that may have arrived into a slot; a negative slot changes nothing."""
    if not pins_layouts():
        return when(slot >= 0, lambda now: _write(now, values, slot), buffers)
    # Cheaper than a loop: accelerators ask the host whether a loop goes on.
    kept = jax.tree.map(lambda b, v: jnp.where(slot >= 0, v, _row(b, slot)), buffers, values)
    return _write(buffers, kept, slot)


def pins_layouts() -> bool:
    """Whether values keep the memory layout of slots without a loop or branch around them.

    What computes or reads a value may need another layout, and if nothing is in between, the
    compiler gives it to the slots, and converts all of them in every tick. A layout constraint is
    in between at no cost. But before JAX 0.12, the compiler gathers what it shards by itself to
    apply one; there, slots are read inside a branch, always the first one, and written in a loop.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sharded = any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in mesh.manual_axes)
    return not sharded or jax.__version_info__ >= (0, 12)


def _pinned(value: Array) -> Array:
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


def _row(buffer: Array, slot: Array | int) -> Array:
    return lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False, allow_negative_indices=False)


def _write(buffers: T, values: T, slot: Array) -> T:
    def write(buffer: Array, value: Array) -> Array:
        value = value.astype(buffer.dtype)
        value = _pinned(value) if pins_layouts() else value
        return lax.dynamic_update_index_in_dim(buffer, value, slot, 0, allow_negative_indices=False)

    return jax.tree.map(write, buffers, values)


def when(needed: Array, update: Callable[[T], T], values: T) -> T:
    """Return ``update(values)`` if needed, else the values.

    It is a loop of zero or one iterations: compilers update the carry of a loop in place, but copy
    the results of a branch, which in every tick may be many gigabytes.
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


@dataclass(frozen=True)
class MessageSplit:
    """Splits messages of one structure into leaves with and without a gradient."""

    has_gradient: tuple[bool, ...]
    tree: TreeDef

    @classmethod
    def of(cls, message: PyTree, *, differentiable: bool = True) -> MessageSplit:
        """Return the split of messages like this one; none has gradients unless differentiable."""
        leaves, tree = jax.tree.flatten(message)
        return cls(tuple(differentiable and is_float(leaf) for leaf in leaves), tree)

    def split(self, message: PyTree) -> tuple[list[Array], list[Array]]:
        """Return the leaves with a gradient, and the others."""
        pairs = list(zip(jax.tree.leaves(message), self.has_gradient, strict=True))
        return [leaf for leaf, has in pairs if has], [leaf for leaf, has in pairs if not has]

    def join(self, floats: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """Return the message with these leaves; the inverse of `split`."""
        first, second = iter(floats), iter(others)
        leaves = [next(first if has else second) for has in self.has_gradient]
        return jax.tree.unflatten(self.tree, leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardMessage:
    """Gradients for the previous stage, or values from an input gradient for its weight gradient.

    Gradients of weights are multiplied by ``weight`` at the end; None if they include it already,
    as they do unless the loss is scaled.
    """

    values: list[Array]
    weight: Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeights:
    """What the blocks of a chunk read: weights, their gradients, or sums of these [chunks, …]."""

    rows: list[BlockRow]
    outer: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadGradient:
    """The losses of a microbatch, gradients of the head's weights, and of its input; or their sums.

    To sums belong the slots of the gradients that wait.
    """

    losses: Losses
    outer: LeafValues
    back: BackwardMessage
