"""Functions of half-precision numbers in few instructions.

Compilers for GPUs compute an error function or a hyperbolic tangent to the last bit of float32,
which takes longer than reading and writing the numbers of a gelu. A half-precision result has 8 or
11 bits; these have 13 or more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.program.evaluate.max_pool import max_pool
from meshwright.program.evaluate.weight_uses import HALF
from meshwright.program.jaxpr.equations import Equation, Numerics, Value, aval_of

_SCALE = 0.44
_ERFCX = (0.24856977, 0.24247186, 0.26398508, 0.0399782, 0.35131808, -0.14632836)
"""exp(y²)·erfc(y) as a polynomial in t = 1 / (1 + _SCALE·y), from t¹, within 6e-6 for y ≥ 0."""
_SLOPE = 1.1283791670955126
"""Of the error function at 0: 2/√π."""
_LEAST_ERF, _LEAST_TANH = 0.06, 1e-3
"""Below, these are the first terms of their series: differences lose digits."""
_STEEP = 9.0
"""From here on, tanh is 1 in float32."""


class HalfFunctions(Numerics):
    """Programs as they were traced, but for slow functions of half-precision numbers."""

    def bind(self, eqn: Equation, operands: Sequence[Value]) -> list[Value]:
        """Run a primitive."""
        name = eqn.primitive.name
        if name not in _SLOW or aval_of(eqn.invars[0]).dtype not in HALF:
            return super().bind(eqn, operands)
        (operand,) = operands
        if function := _FUNCTIONS.get(name):
            return [function(operand.astype(jnp.float32)).astype(operand.dtype)]
        pooled = max_pool(operand, eqn.params)
        return super().bind(eqn, operands) if pooled is None else [pooled]


@jax.custom_jvp
def erfc(x: Array) -> Array:
    """Return the complementary error function, within 1e-5 of itself."""
    size = jnp.abs(x)
    t = _inverse(1 + _SCALE * size)
    polynomial: Any = _ERFCX[-1]
    for coefficient in reversed(_ERFCX[:-1]):
        polynomial = coefficient + t * polynomial
    tail = t * polynomial * jnp.exp(-x * x)
    return jnp.where(x < 0, 2 - tail, tail)


@jax.custom_jvp
def erf(x: Array) -> Array:
    """Return the error function, within 1e-4 of itself."""
    return jnp.where(jnp.abs(x) < _LEAST_ERF, _SLOPE * (x - x * x * x / 3), 1 - erfc(x))


@jax.custom_jvp
def tanh(x: Array) -> Array:
    """Return the hyperbolic tangent, within 1e-4 of itself."""
    falling = jnp.exp(-2 * jnp.maximum(x, -_STEEP))
    return jnp.where(jnp.abs(x) < _LEAST_TANH, x, (1 - falling) * _inverse(1 + falling))


erfc.defjvps(lambda slope, _, x: -_SLOPE * jnp.exp(-x * x) * slope)
erf.defjvps(lambda slope, _, x: _SLOPE * jnp.exp(-x * x) * slope)
tanh.defjvps(lambda slope, value, _: (1 - value * value) * slope)


def _inverse(x: Array) -> Array:
    """Return 1/x of positive numbers: a square root is one instruction, a division is ten."""
    root = lax.rsqrt(x)
    return root * root


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {"erfc": erfc, "erf": erf, "tanh": tanh}
_SLOW = {*_FUNCTIONS, "reduce_window_max"}
