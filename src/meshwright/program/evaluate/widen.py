"""Widening a traced program to float64, including dtypes that the model fixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.jaxpr.derivatives import pullback_of, pushforward_of
from meshwright.program.jaxpr.equations import Equation, Value, bind, called_jaxpr

NARROW = (jnp.float32, jnp.bfloat16, jnp.float16)
_DTYPE_PARAMS = ("new_dtype", "dtype", "preferred_element_type")


def widen(value: Any) -> Any:
    """Return a floating or complex value as float64 or complex128, anything else as it is."""
    return jnp.asarray(value, _wider(value.dtype)) if is_narrow(value) else value


def is_narrow(value: Any) -> bool:
    """Whether a value is floating point or complex and not of the widest dtype."""
    return _wider(getattr(value, "dtype", None)) is not None


def _wider(dtype: Any) -> Any:
    if dtype in NARROW:
        return jnp.dtype(jnp.float64)
    return jnp.dtype(jnp.complex128) if dtype == jnp.complex64 else None


class Float64:
    """Every float32, bfloat16 and float16 value stored as float64.

    Needs `jax.enable_x64`. Random numbers are drawn in the program's original dtype first, so the
    bits are the same as without widening.
    """

    def convert(self, value: Value) -> Value:
        """Return a value widened: literals have the narrow dtype they were traced in."""
        return widen(value)

    def bind(self, eqn: Equation, operands: Sequence[Value]) -> list[Value]:
        """Run a primitive in float64, or in its original dtype where bits matter."""
        name = eqn.primitive.name
        if name == "reduce_precision":
            return list(operands)
        if name in ("bitcast_convert_type", "random_bits"):
            # The number of bits is fixed: compute as written, then widen.
            narrowed = [_as_traced(a, v.aval) for a, v in zip(operands, eqn.invars, strict=True)]
            return [widen(out) for out in bind(eqn, narrowed)]
        params = dict(eqn.params)
        for key in _DTYPE_PARAMS:
            if (wider := _wider(params.get(key))) is not None:
                params[key] = wider
        return bind(eqn.replace(params=params), operands)


def wide_evaluator() -> Evaluator:
    """Return an evaluator that computes a program as it is written, in float64."""
    return Evaluator([widen_derivatives], numerics=Float64())


def widen_derivatives(eqn: Equation, env: Environment) -> list[Value] | None:
    """Evaluate a custom_jvp or custom_vjp function, and widen its derivative too."""
    if eqn.primitive.name == "custom_jvp_call":
        return _with_pushforward(eqn, env)
    if eqn.primitive.name == "custom_vjp_call":
        return _with_pullback(eqn, env)
    return None


def _with_pushforward(eqn: Equation, env: Environment) -> list[Value]:
    primal, tangent = called_jaxpr(eqn), pushforward_of(eqn)
    function = jax.custom_jvp(lambda *operands: env.run(primal, operands))

    def jvp(primals: Any, tangents: Any) -> Any:
        out = env.run(tangent, [*primals, *tangents])
        half = len(out) // 2
        return out[:half], out[half:]

    function.defjvp(jvp)
    return list(function(*env.operands(eqn)))


def _with_pullback(eqn: Equation, env: Environment) -> list[Value]:
    primal = called_jaxpr(eqn)
    function = jax.custom_vjp(lambda *operands: env.run(primal, operands))

    def forward(*operands: Any) -> Any:
        return env.run(primal, operands), operands

    def backward(operands: Any, cotangents: Any) -> Any:
        return tuple(env.run(pullback_of(eqn), [*operands, *cotangents]))

    function.defvjp(forward, backward)
    return list(function(*env.operands(eqn)))


def _as_traced(value: Any, aval: Any) -> Any:
    return jnp.asarray(value, aval.dtype) if is_narrow(aval) else value
