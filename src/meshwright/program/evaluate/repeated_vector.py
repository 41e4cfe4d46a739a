"""Repeating a vector for every row; its gradient, a sum over all rows, is added up in two steps."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.mesh.axes import CONTEXT
from meshwright.program.evaluate.mesh_view import MeshView

FEWEST_PARTS = 64
"""So many sums side by side keep a GPU busy."""
FEWEST_ROWS = 8
"""A part with fewer rows than this is not worth a sum of its own."""


def repeats_on(mesh: MeshView) -> Callable[[Any, Sequence[int]], Any]:
    """Return `repeat_vector` for the rows of a mesh."""
    of_positions = mesh.auto_axes.get(CONTEXT, 1)
    return partial(repeat_vector, num_shards=mesh.num_auto, of_positions=of_positions)


def repeat_vector(
    vector: Any, shape: Sequence[int], *, num_shards: int = 1, of_positions: int = 1
) -> Any:
    """Return a vector broadcast to ``shape``.

    A GPU computes one sum over thousands of rows with a few of its processors, and a kernel that
    also computes the gradient of an activation is then as slow. Sums over parts of the rows occupy
    all of them.

    Args:
        vector: has the trailing dims of ``shape``; leading dims of size 1 are ignored.
        shape: what it is broadcast to.
        num_shards: devices that the rows are sharded over, along their first dim.
        of_positions: how many of these they are sharded over along their last dim instead.
    """
    larger = (n for n, size in enumerate(vector.shape) if size != 1)
    vector = vector.reshape(vector.shape[next(larger, max(vector.ndim - 1, 0)) :])
    rows = tuple(shape[: len(shape) - vector.ndim])
    same = tuple(shape[len(rows) :]) == vector.shape
    parts = parts_of(rows, num_shards, of_positions) if same else None
    if parts is None:
        return jnp.broadcast_to(vector, shape)

    run = jax.custom_vjp(lambda vector: jnp.broadcast_to(vector, shape))

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        split = (*rows[:-1], parts, rows[-1] // parts)
        of_parts = cotangent.reshape(*split, *vector.shape).sum(len(rows))
        # The compiler would otherwise join the two sums.
        of_parts = lax.optimization_barrier(of_parts)
        return (of_parts.sum(tuple(range(len(rows)))),)

    run.defvjp(lambda vector: (run(vector), None), backward)
    return run(vector)


def parts_of(rows: Sequence[int], num_shards: int, of_positions: int = 1) -> int | None:
    """Return into how many parts the last dim of the rows is divided; None for one plain sum."""
    if not rows or (len(rows) == 1 and num_shards > 1):
        return None
    before = max(1, math.prod(rows[:-1]) // num_shards)
    last = rows[-1]
    # Parts that several devices share would be gathered.
    counts = range(of_positions, last // FEWEST_ROWS + 1, of_positions)
    divisors = [n for n in counts if last % n == 0]
    if not divisors:
        return None
    parts = next((n for n in divisors if before * n >= FEWEST_PARTS), divisors[-1])
    return parts if before * parts > 1 else None
