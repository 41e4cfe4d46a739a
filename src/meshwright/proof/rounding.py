"""Tolerances for comparisons outside of float64: how much rounding alone can change a result."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from meshwright.program.dims.op import free_dims
from meshwright.program.jaxpr.equations import PRODUCTS, ClosedJaxpr, Equation, Var, aval_of
from meshwright.program.jaxpr.walks import all_equations, called_programs
from meshwright.program.trace.traced_loss import TracedLoss

MARGIN = 2.0
"""The tolerance as a multiple of the typical error."""


_EXACT = frozenset(
    {
        *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
        *("dynamic_update_slice", "gather", "neg", "abs", "max", "min", "pad", "reduce_max"),
        *("reduce_min", "reshape", "rev", "select_n", "sharding_constraint", "slice", "sort"),
        *("split", "squeeze", "stop_gradient", "transpose", "clamp", "sign", "floor", "round"),
        *("reduce_precision", "optimization_barrier", "name", "random_bits", "while", "cond"),
    }
)
"""Operations that do not round: they move or select numbers, or contain other equations."""

_PASSES = 3
"""Products per forward product: one forward, two backward (for the input and the weight)."""

_FLOAT32 = 2.0**-24
_TENSORFLOAT32 = 2.0**-11
_BFLOAT16 = 2.0**-8
"""Largest relative error of one rounding: half the distance between neighbouring numbers."""

_OPERANDS = {
    "cpu": {},
    "gpu": {"default": _TENSORFLOAT32, "tensorfloat32": _TENSORFLOAT32, "bfloat16": _BFLOAT16},
    "tpu": {"default": _BFLOAT16, "bfloat16": _BFLOAT16},
}
"""By platform and matmul precision, the rounding error of the operands of a float32 product."""


@dataclass(frozen=True)
class Rounding:
    """Tolerances of the loss, and of gradients and state; and the largest error of one rounding."""

    loss: float
    gradients: float
    unit: float


def rounding_of(
    traced: TracedLoss, *, matmul: str = "default", platform: str = "cpu", casts: bool = False
) -> Rounding:
    """Return how much rounding may change a loss, its gradients and state."""
    tolerance = rounding_tolerance(traced.closed, matmul=matmul, platform=platform, casts=casts)
    trained = {n: leaf.dtype for n, leaf in enumerate(traced.leaves) if leaf.role == "param"}
    # Products in the same format round more than the cast; without any, the cast remains.
    cast = gradient_rounding(_formats_read(traced.closed, trained))
    return Rounding(
        loss=tolerance,
        gradients=max(tolerance + gradient_rounding(trained.values()), cast),
        unit=_largest_unit(traced.closed, matmul=matmul, platform=platform),
    )


def rounding_tolerance(
    closed: ClosedJaxpr, *, matmul: str = "default", platform: str = "cpu", casts: bool = False
) -> float:
    """Return how much two correct evaluations of a program and its gradients may differ.

    The difference is relative to the size of the terms that are summed. Independent errors add up
    like a random walk:

    - every product rounds its result to its number format, once forward and twice backward: with N
      products and u the largest error of one rounding, u·√(3N);
    - other arithmetic (norms, softmax, activations) rounds too. It counts as float32 whatever its
      format, because compilers hold the values between such operations in registers;
    - a sum of n terms rounds after each term, in float32: u₃₂·√n for the longest sum.

    With ``casts``, one of the two does not round where the program casts to a narrower format, as
    in float64.
    """
    operands = _OPERANDS.get(platform, {}).get(matmul, 0.0)
    variance, longest = 0.0, 1
    for eqn, times in all_equations(closed.jaxpr):
        if eqn.primitive.name in PRODUCTS:
            unit = max(_unit_roundoff(aval_of(eqn.outvars[0]).dtype), operands)
            variance += _PASSES * times * unit**2
        elif casts and (unit := _cast_unit(eqn)):
            variance += _PASSES * times * unit**2
        elif _is_arithmetic(eqn):
            variance += _PASSES * times * _FLOAT32**2
        longest = max(longest, _terms(eqn))
    return MARGIN * (math.sqrt(variance) + _FLOAT32 * math.sqrt(longest))


def _largest_unit(closed: ClosedJaxpr, *, matmul: str = "default", platform: str = "cpu") -> float:
    """Return the largest error of one rounding in a program, which is at least that of float32."""
    operands = _OPERANDS.get(platform, {}).get(matmul, 0.0)
    products = [
        _unit_roundoff(aval_of(eqn.outvars[0]).dtype)
        for eqn, _ in all_equations(closed.jaxpr)
        if eqn.primitive.name in PRODUCTS
    ]
    return max(_FLOAT32, operands, *products)


def update_tolerances(closed: ClosedJaxpr, formats: Mapping[str, Any]) -> dict[str, float]:
    """Return how much an optimizer's update may round a leaf, relative to its largest element."""
    count = sum(times for eqn, times in all_equations(closed.jaxpr) if _is_arithmetic(eqn))
    growth = MARGIN * math.sqrt(max(1.0, count / len(formats)))
    return {path: growth * max(_unit_roundoff(dtype), _FLOAT32) for path, dtype in formats.items()}


def gradient_rounding(formats: Iterable[Any]) -> float:
    """Return the error of rounding a gradient to the format of its parameter.

    It is zero for 32-bit formats, whose rounding `rounding_tolerance` includes.
    """
    return max(
        (_unit_roundoff(dtype) for dtype in formats if jnp.dtype(dtype).itemsize < 4), default=0.0
    )


def _formats_read(closed: ClosedJaxpr, inputs: Collection[int]) -> list[Any]:
    """Return the formats that a program casts these of its inputs to.

    Their gradients are rounded to them, unless the mesh sums them in float32.
    """
    variables = {closed.jaxpr.invars[number] for number in inputs}
    return [
        aval_of(eqn.outvars[0]).dtype
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "convert_element_type"
        and isinstance(eqn.invars[0], Var)
        and eqn.invars[0] in variables
    ]


def random_draws(closed: ClosedJaxpr) -> list[tuple[Any, ...]]:
    """Return bit width and shape of every random draw; equal ones draw the same numbers."""
    return [
        (eqn.params["bit_width"], eqn.params["shape"])
        for eqn, _ in all_equations(closed.jaxpr)
        if eqn.primitive.name == "random_bits"
    ]


def _is_arithmetic(eqn: Equation) -> bool:
    """Whether an equation rounds; equations that contain others do not count."""
    if eqn.primitive.name in _EXACT or not eqn.outvars or any(called_programs(eqn)):
        return False
    return jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.inexact)


def _cast_unit(eqn: Equation) -> float:
    """Return the rounding error of a cast to fewer bits than float32 has; 0 for anything else."""
    if eqn.primitive.name == "reduce_precision":
        bits = eqn.params["mantissa_bits"]
        return 2.0 ** -(bits + 1) if bits < 23 else 0.0
    if eqn.primitive.name != "convert_element_type":
        return 0.0
    source, target = (aval_of(x).dtype for x in (eqn.invars[0], eqn.outvars[0]))
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (source, target)):
        return 0.0
    unit = _unit_roundoff(target)
    return unit if unit > max(_unit_roundoff(source), _FLOAT32) else 0.0


def _terms(eqn: Equation) -> int:
    """Return the number of terms in the sums of an equation or its gradients."""
    name = eqn.primitive.name
    if name == "dot_general":
        return _terms_of_product(eqn)
    if name == "conv_general_dilated":
        return _terms_of_convolution(eqn)
    if name in ("reduce_sum", "broadcast_in_dim", "cumsum"):
        sizes = [math.prod(aval_of(x).shape) for x in (eqn.invars[0], eqn.outvars[0])]
        return max(sizes) // max(min(sizes), 1)
    return 1


def _terms_of_product(eqn: Equation) -> int:
    """Return the largest of contracted size, rows and columns: gradients sum over the last two."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    sides = (0, contracted), (0, free_dims(eqn, 0)), (1, free_dims(eqn, 1))
    return max(math.prod(aval_of(eqn.invars[n]).shape[d] for d in dims) for n, dims in sides)


def _terms_of_convolution(eqn: Equation) -> int:
    """Return the larger of the terms of one output and the outputs that use a kernel element."""
    numbers = eqn.params["dimension_numbers"]
    kernel, out = aval_of(eqn.invars[1]).shape, aval_of(eqn.outvars[0]).shape
    features = kernel[numbers.rhs_spec[0]]
    return max(math.prod(kernel) // features, math.prod(out) // features)


def _unit_roundoff(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) / 2
