"""Widening a traced program to float64, formats fixed in the model's own code included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.derivatives import pullback_of, pushforward_of
from meshwright.program.interpret import Interpreter
from meshwright.program.jaxprs import Equation, bind, called_jaxpr

NARROW = (jnp.float32, jnp.bfloat16, jnp.float16)
_DTYPE_PARAMS = ("new_dtype", "dtype", "preferred_element_type")


def widen(value: Any) -> Any:
    """Return a floating or complex value as float64 or complex128, anything else as it is."""
    return jnp.asarray(value, _wider(value.dtype)) if is_narrow(value) else value


def is_narrow(value: Any) -> bool:
    """Whether a value is floating point or complex and narrower than it could be."""
    return _wider(getattr(value, "dtype", None)) is not None


def _wider(dtype: Any) -> Any:
    if dtype in NARROW:
        return jnp.dtype(jnp.float64)
    return jnp.dtype(jnp.complex128) if dtype == jnp.complex64 else None


class Widening(Interpreter):
    """Evaluates a program with every float32, bfloat16 and float16 value held as float64.

    Needs `jax.enable_x64`. Random numbers are drawn in the program's own format first, so the
    same bits fall as without widening.
    """

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr on widened constants and arguments."""
        return super().evaluate(jaxpr, [widen(c) for c in consts], [widen(a) for a in args])

    def read(self, atom: Any, env: Any) -> Any:
        """Return a value, widened: literals carry the narrow format they were traced in."""
        return widen(super().read(atom, env))

    def leaf(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate one equation in float64, or in its own format where bits matter."""
        name = eqn.primitive.name
        if name in ("bitcast_convert_type", "random_bits", "reduce_precision"):
            # Bits have one width: compute as written, then widen.
            if name == "reduce_precision":
                return list(args)
            narrowed = [_as_traced(a, v.aval) for a, v in zip(args, eqn.invars, strict=True)]
            return [widen(out) for out in bind(eqn, narrowed)]
        params = dict(eqn.params)
        for key in _DTYPE_PARAMS:
            if (wider := _wider(params.get(key))) is not None:
                params[key] = wider
        return bind(eqn.replace(params=params), args)

    def enter_custom_jvp_call(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a function with its own derivative, the derivative's program widened too."""
        primal, tangent = called_jaxpr(eqn), pushforward_of(eqn)
        function = jax.custom_jvp(lambda *operands: self.run(primal, operands))

        def jvp(primals: Any, tangents: Any) -> Any:
            out = self.run(tangent, [*primals, *tangents])
            half = len(out) // 2
            return out[:half], out[half:]

        function.defjvp(jvp)
        return list(function(*args))

    def enter_custom_vjp_call(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a function with its own pullback, the pullback's program widened too."""
        primal = called_jaxpr(eqn)
        function = jax.custom_vjp(lambda *operands: self.run(primal, operands))

        def forward(*operands: Any) -> Any:
            return self.run(primal, operands), operands

        def backward(operands: Any, cotangents: Any) -> Any:
            return tuple(self.run(pullback_of(eqn), [*operands, *cotangents]))

        function.defvjp(forward, backward)
        return list(function(*args))


def _as_traced(value: Any, aval: Any) -> Any:
    return jnp.asarray(value, aval.dtype) if is_narrow(aval) else value
