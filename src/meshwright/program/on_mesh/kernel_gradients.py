"""Gradients of convolution kernels on GPUs.

cuDNN has no convolution of half-precision numbers with a float32 kernel gradient. Asked for one,
XLA widens both operands, which takes twice their memory, and multiplies at half the rate.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshwright.program.jaxpr.equations import Equation, Value, aval_of


def product_gradient(eqn: Equation, activations: Value, cotangent: Value) -> Value | None:
    """Return the kernel gradient of a convolution that is a product of each position's channels.

    Products of half-precision numbers are summed in float32.

    Args:
        eqn: the convolution.
        activations: what it reads.
        cotangent: of its result.

    Returns:
        The gradient in float32; None if the convolution is no such product, or if channels are
        not the last dim.
    """
    numbers, kernel = eqn.params["dimension_numbers"], aval_of(eqn.invars[1]).shape
    last = len(kernel) - 1
    outputs, inputs, *window = numbers.rhs_spec
    if not _is_product(eqn.params) or any(kernel[dim] != 1 for dim in window):
        return None
    if numbers.lhs_spec != numbers.out_spec or numbers.lhs_spec[:2] != (0, last):
        return None
    steps = dict(zip(numbers.lhs_spec[2:], eqn.params["window_strides"], strict=True))
    strides = [steps.get(dim, 1) for dim in range(last + 1)]
    if max(strides) > 1:
        activations = lax.slice(activations, [0] * (last + 1), activations.shape, strides)
    left, right = (
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (activations, cotangent)
    )
    if outputs < inputs:
        left, right = right, left
    product = lax.dot_general(
        left,
        right,
        (((0,), (0,)), ((), ())),
        precision=eqn.params["precision"],
        preferred_element_type=jnp.float32,
    )
    return product.reshape(kernel)


def _is_product(params: dict[str, Any]) -> bool:
    padded = any(side != 0 for sides in params["padding"] for side in sides)
    dilated = any(step != 1 for step in params["lhs_dilation"])
    grouped = max(params["feature_group_count"], params["batch_group_count"]) > 1
    return not (padded or dilated or grouped)
