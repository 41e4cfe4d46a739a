"""The largest number of each window, with a gradient that knows where it was.

Compilers for GPUs search the windows again for the gradient, and add it position by position in
memory. Here, each position asks the windows that it is in.
"""

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_MOST_WINDOWS = 16
"""Of one position, or positions of a window. More are left to the compiler."""


def max_pool(x: Array, params: Mapping[str, Any]) -> Array | None:
    """Return what `jax.lax.reduce_window_max` does; None where its gradient is left to JAX."""
    window, strides = params["window_dimensions"], params["window_strides"]
    dilated = max(*params["base_dilation"], *params["window_dilation"]) > 1
    if dilated or not 1 < math.prod(window) <= _MOST_WINDOWS:
        return None
    pool = partial(_largest, window=window, strides=strides, padding=params["padding"])
    run = jax.custom_vjp(lambda x: pool(x)[0])
    run.defvjp(pool, partial(_gradient, x.shape, window, strides, params["padding"]))
    return run(x)


def _largest(x: Array, *, window: Any, strides: Any, padding: Any) -> tuple[Array, Array]:
    """Return the largest number of each window, and the number of its position in the window."""
    least = jnp.full((), -jnp.inf, x.dtype)
    padded = lax.pad(x, least, [(low, high, 0) for low, high in padding])
    ends = [n - size for n, size in zip(padded.shape, window, strict=True)]
    best: Any = None
    at: Any = None
    for number, offsets in enumerate(itertools.product(*map(range, window))):
        limits = [offset + end + 1 for offset, end in zip(offsets, ends, strict=True)]
        value = lax.slice(padded, offsets, limits, strides)
        if best is None:
            best, at = value, jnp.zeros(value.shape, jnp.int8)
            continue
        # The first of equal numbers, and NaN, stay.
        larger = (value > best) | (value != value)
        best, at = jnp.where(larger, value, best), jnp.where(larger, jnp.int8(number), at)
    # Compilers would search again rather than keep the positions.
    return lax.optimization_barrier((best, at))


def _gradient(
    shape: Any, window: Any, strides: Any, padding: Any, at: Array, cotangent: Array
) -> tuple[Array]:
    """Return for each position the sum over windows of which it is the largest."""
    lows = [low for low, _ in padding]
    cells = [-(-(low + n) // step) for low, n, step in zip(lows, shape, strides, strict=True)]
    # A position is in the window that starts in its cell, and in some that start in cells before.
    before = [(size - 1) // step for size, step in zip(window, strides, strict=True)]
    # Filled up once, so that no read asks whether it is inside.
    filled = [(b, n - m, 0) for b, n, m in zip(before, cells, at.shape, strict=True)]
    both = ((at, -1), (cotangent, 0))
    padded = [lax.pad(array, jnp.full((), empty, array.dtype), filled) for array, empty in both]
    padded = lax.optimization_barrier(padded)
    inside = [size for pair in zip(cells, strides, strict=True) for size in pair]
    total: Any = jnp.zeros(inside, jnp.float32)
    for shifts in itertools.product(*(range(b + 1) for b in before)):
        starts = [b - shift for b, shift in zip(before, shifts, strict=True)]
        limits = [start + n for start, n in zip(starts, cells, strict=True)]
        winner, value = (
            lax.broadcast_in_dim(lax.slice(x, starts, limits), inside, range(0, len(inside), 2))
            for x in padded
        )
        number: Any = 0
        reached: Any = True
        for dim, shift in enumerate(shifts):
            offset = lax.broadcasted_iota(jnp.int32, inside, 2 * dim + 1) + shift * strides[dim]
            number = number * window[dim] + offset
            reached = reached & (offset < window[dim])
        total += jnp.where(reached & (winner == number), value.astype(jnp.float32), 0)
    whole = total.reshape([n * step for n, step in zip(cells, strides, strict=True)])
    ends = [low + n for low, n in zip(lows, shape, strict=True)]
    return (lax.slice(whole, lows, ends).astype(cotangent.dtype),)
