"""How many floating-point operations a traced loss takes, and how many the devices can do."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.config.schema import Precision
from meshwright.hardware import detect
from meshwright.program.jaxpr.equations import Equation, Jaxpr, aval_of
from meshwright.program.jaxpr.walks import called_programs
from meshwright.program.trace.traced_loss import TracedLoss

TRAINING = 3
"""Cost of a forward and a backward pass, in forward passes: a product has two gradients."""
DTYPES: Mapping[Precision, str] = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtype of products by the compute format of a plan."""


def count_flops(traced: TracedLoss) -> int:
    """Count the floating-point operations of one microbatch, forward and backward, all devices.

    Only matrix products and convolutions count, a multiplication and an addition as two; the rest
    of a model is negligible. Recomputation by remat does not count.
    """
    return TRAINING * forward_flops(traced.closed.jaxpr)


def forward_flops(jaxpr: Jaxpr) -> int:
    """Count the operations of products and convolutions in a program, in every loop iteration."""
    return sum(equation_flops(eqn) for eqn in jaxpr.eqns)


def peak_flops(devices: Sequence[Any], precision: Precision) -> float | None:
    """Return the operations per second of all devices together; None if that is unknown.

    For CPUs no figure is meaningful: virtual devices share the same cores.
    """
    hardware = detect(devices)
    if hardware is None or hardware.chip.platform == "cpu":
        return None
    return hardware.count * hardware.chip.peak_of(DTYPES[precision])


def equation_flops(eqn: Equation) -> int:
    """Count the operations of one equation: of products, convolutions and what it calls."""
    name = eqn.primitive.name
    if rule := _RULES.get(name):
        return rule(eqn)
    if name.startswith("dot_product_attention_fwd"):
        return _attention(eqn)
    # Of a loop without a known number of iterations one counts, and of branches the longest.
    times = eqn.params["length"] if name == "scan" else 1
    return times * max((forward_flops(p.jaxpr) for p, _ in called_programs(eqn)), default=0)


def _product(eqn: Equation) -> int:
    """Count a product; in a ragged one each row is multiplied with one of several matrices."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
    (contracted, _), _ = numbers
    left, out = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    return 2 * math.prod(out) * math.prod(left[dim] for dim in contracted)


def _convolution(eqn: Equation) -> int:
    """Count the pairs of kernel and input elements that are multiplied, without padding."""
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    image, kernel, out = (aval_of(v).shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    spatial: Any = zip(
        *(spec[2:] for spec in (dims.lhs_spec, dims.rhs_spec, dims.out_spec)),
        *(params[n] for n in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")),
        strict=True,
    )
    num_pairs = 1
    for at, taps, to, stride, (before, _), dilation, step in spatial:
        # Which element of the dilated input each output reads with each tap of the kernel.
        read = np.arange(out[to])[:, None] * stride + np.arange(kernel[taps]) * step - before
        is_element = (read >= 0) & (read % dilation == 0) & (read // dilation < image[at])
        num_pairs *= int(np.sum(is_element))
    batch, features = (out[dim] for dim in dims.out_spec[:2])
    return 2 * batch * features * kernel[dims.rhs_spec[1]] * num_pairs


def _attention(eqn: Equation) -> int:
    """Count the two products inside a fused attention of (batch, time, heads, features)."""
    query, key = (aval_of(atom).shape for atom in eqn.invars[:2])
    return 4 * math.prod(query) * key[1]


_RULES: Mapping[str, Callable[[Equation], int]] = {
    "dot_general": _product,
    "ragged_dot_general": _product,
    "conv_general_dilated": _convolution,
}
