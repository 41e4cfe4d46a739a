"""Convolutions of few channels, such as those of images, as convolutions of cells.

Tensor cores multiply eight channels at a time. If there are three, cuDNN fills them up, and its
kernels for that take several times as long. So a convolution with a stride reads the pixels of a
cell, which is as large as the stride, as channels of one position. The kernel is filled up with
zeros to whole cells, and products with zero change no sum.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from meshwright.program.jaxpr.equations import Equation, aval_of

_FEW = 4
_AT_ONCE = 8
"""Channels that tensor cores multiply."""
_WHOLE = (0, 0, 0)


def in_cells(
    eqn: Equation, pixels: Array, kernel: Array
) -> tuple[dict[str, Any], list[Array]] | None:
    """Return parameters and operands of the same convolution of cells; None if it has no cells."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    strides, last = params["window_strides"], pixels.ndim - 1
    steps = (*params["lhs_dilation"], *params["rhs_dilation"])
    groups = params["feature_group_count"] * params["batch_group_count"]
    channels_last = (0, last, *range(1, last))
    layouts = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    known = layouts == (channels_last, (last, last - 1, *range(last - 1)), channels_last)
    if not known or min(strides) == 1 or max(*steps, groups) > 1 or pixels.shape[-1] > _FEW:
        return None
    margins: list[tuple[int, int, int]] = []
    ends: list[tuple[int, int, int]] = []
    for number, stride in enumerate(strides):
        cells = -(-kernel.shape[number] // stride)
        length = (aval_of(eqn.outvars[0]).shape[number + 1] + cells - 1) * stride
        low, _ = params["padding"][number]
        # What no window reads is cut off.
        margins.append((low, length - low - pixels.shape[number + 1], 0))
        ends.append((0, cells * stride - kernel.shape[number], 0))
    more = (0, -math.prod(strides) * pixels.shape[-1] % _AT_ONCE, 0)
    inside = _joined(_padded(pixels, _WHOLE, *margins, _WHOLE), strides, first=1)
    weights = _joined(_padded(kernel, *ends, _WHOLE, _WHOLE), strides, first=0)
    whole = [_WHOLE] * len(strides)
    none = {"window_strides": (1,) * len(strides), "padding": ((0, 0),) * len(strides)}
    operands = [_padded(inside, _WHOLE, *whole, more), _padded(weights, *whole, more, _WHOLE)]
    return params | none, operands


def _padded(array: Array, *dims: tuple[int, int, int]) -> Array:
    return lax.pad(array, jnp.zeros((), array.dtype), dims)


def _joined(array: Array, strides: Sequence[int], *, first: int) -> Array:
    """Return an array whose dims from ``first`` on are divided, and joined with channels."""
    end = first + len(strides)
    sizes = [s for n, step in enumerate(strides) for s in (array.shape[first + n] // step, step)]
    divided = array.reshape(*array.shape[:first], *sizes, *array.shape[end:])
    cells, parts = range(first, first + len(sizes), 2), range(first + 1, first + len(sizes), 2)
    rest = range(first + len(sizes), divided.ndim)
    moved = divided.transpose(*range(first), *cells, *parts, *rest)
    channels = math.prod(strides) * array.shape[end]
    return moved.reshape(*moved.shape[:end], channels, *array.shape[end + 1 :])
