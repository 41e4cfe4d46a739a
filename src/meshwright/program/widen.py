"""Widening a traced program to float64, formats fixed in the model's own code included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.interpret import Interpreter
from meshwright.program.jaxprs import ClosedJaxpr, Equation, bind, called_jaxpr

NARROW = (jnp.float32, jnp.bfloat16, jnp.float16)
_DTYPE_PARAMS = ("new_dtype", "dtype", "preferred_element_type")


def widen(value: Any) -> Any:
    """Return a floating value as float64, anything else as it is."""
    return jnp.asarray(value, jnp.float64) if is_narrow(value) else value


def is_narrow(value: Any) -> bool:
    """Whether a value is floating point and narrower than float64."""
    return getattr(value, "dtype", None) in NARROW


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
            if params.get(key) in NARROW:
                params[key] = jnp.dtype(jnp.float64)
        return bind(eqn.replace(params=params), args)

    def enter_custom_jvp_call(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a function with its own derivative, the derivative's program widened too."""
        primal: ClosedJaxpr = called_jaxpr(eqn)
        tangent = _derivative_jaxpr(eqn, primal)
        function = jax.custom_jvp(lambda *operands: self.run(primal, operands))

        def jvp(primals: Any, tangents: Any) -> Any:
            out = self.run(tangent, [*primals, *tangents])
            half = len(out) // 2
            return out[:half], out[half:]

        function.defjvp(jvp)
        return list(function(*args))

    def enter_custom_vjp_call(self, eqn: Equation, args: list[Any]) -> list[Any]:
        """Evaluate a function with its own pullback, the pullback's program widened too."""
        primal: ClosedJaxpr = called_jaxpr(eqn)
        function = jax.custom_vjp(lambda *operands: self.run(primal, operands))

        def forward(*operands: Any) -> Any:
            return self.run(primal, operands), operands

        def backward(operands: Any, cotangents: Any) -> Any:
            pullback = _pullback_jaxpr(eqn, primal)
            return tuple(self.run(pullback, [*operands, *cotangents]))

        function.defvjp(forward, backward)
        return list(function(*args))


def _structs(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def _as_traced(value: Any, aval: Any) -> Any:
    return jnp.asarray(value, aval.dtype) if is_narrow(aval) else value


def _derivative_jaxpr(eqn: Equation, primal: ClosedJaxpr) -> ClosedJaxpr:
    structs = _structs(primal.jaxpr.invars)
    count = len(structs)
    function = lambda *operands: bind(eqn, operands)  # noqa: E731

    def jvp(*both: Any) -> Any:
        out, tangents = jax.jvp(function, list(both[:count]), list(both[count:]))
        return [*out, *tangents]

    return jax.make_jaxpr(jvp)(*structs, *_tangent_structs(structs))


def _pullback_jaxpr(eqn: Equation, primal: ClosedJaxpr) -> ClosedJaxpr:
    structs = _structs(primal.jaxpr.invars)
    count = len(structs)

    def pullback(*both: Any) -> Any:
        _, pull = jax.vjp(lambda *operands: bind(eqn, operands), *both[:count])
        return list(pull(list(both[count:])))

    outputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in primal.out_avals]
    return jax.make_jaxpr(pullback)(*structs, *_tangent_structs(outputs))


def _tangent_structs(structs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    return [
        s
        if jnp.issubdtype(s.dtype, jnp.inexact)
        else jax.ShapeDtypeStruct(s.shape, jax.dtypes.float0)
        for s in structs
    ]
