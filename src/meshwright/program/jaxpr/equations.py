"""Reading and binding equations and their derivatives, whatever the JAX release."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from meshwright.program.jaxpr.names import module_of

Jaxpr = core.Jaxpr
# JAX 0.12 keeps this name for the merged class at run time but does not export it to type checkers.
ClosedJaxpr = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
Equation = core.JaxprEqn
Var = core.Var
Literal = core.Literal
Atom = Var | Literal
Value = Any
"""An array, concrete or traced, or a scalar where JAX accepts one."""
_Input = TypeVar("_Input")

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call", "custom_lin"})
"""Primitives that only call a jaxpr and can be replaced by its body."""

REMATS = frozenset({"remat2", "checkpoint"})
"""Primitives that run a jaxpr, and recompute it for its gradient."""

REARRANGES = frozenset(
    {"broadcast_in_dim", "dynamic_slice", "reshape", "slice", "squeeze", "transpose"}
)
"""Primitives that only move, repeat or drop elements of their operand."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""Primitives that multiply matrices or windows."""

WITHOUT_RESULT = frozenset({"check", "debug_callback", "debug_print", "inspect_sharding"})
"""Primitives without results, which only report or check their operands."""


def bind(eqn: Equation, args: Sequence[Any]) -> list[Any]:
    """Run one equation on other arguments."""
    params: Any = eqn.primitive.get_bind_params(eqn.params)
    # Some JAX releases return functions and parameters, others the parameters alone.
    functions, params = params if isinstance(params, tuple) else ((), params)
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


class Numerics:
    """The dtypes that a program is evaluated in: those it was traced in."""

    def convert(self, value: Value) -> Value:
        """Return a value in the dtype that it is stored in."""
        return value

    def bind(self, eqn: Equation, operands: Sequence[Value]) -> list[Value]:
        """Run a primitive on operands stored in that dtype."""
        return bind(eqn, operands)


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """Return how many constants and how many carries a scan equation has."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def scan_parts(
    eqn: Equation, inputs: Sequence[_Input]
) -> tuple[list[_Input], list[_Input], list[_Input]]:
    """Divide what belongs to the inputs of a scan equation: its constants, carries and stacks."""
    consts, carries = scan_counts(eqn)
    start = consts + carries
    return [*inputs[:consts]], [*inputs[consts:start]], [*inputs[start:]]


def called_jaxpr(eqn: Equation) -> ClosedJaxpr:
    """Return the jaxpr a call, remat or custom-derivative equation runs."""
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr")
    assert inner is not None, eqn.primitive.name
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def aval_of(atom: Any) -> Any:
    """Return the shape and dtype of a variable or literal."""
    return atom.aval


def structs_of(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of variables and literals, to trace a function with."""
    return [jax.ShapeDtypeStruct(aval_of(a).shape, aval_of(a).dtype) for a in atoms]


def name_stack(eqn: Equation) -> str:
    """Return the scopes an equation was traced in."""
    return str(eqn.source_info.name_stack)


def equation_module(eqn: Equation) -> str:
    """Return the path of the module that an equation belongs to; empty if it is in none."""
    return module_of(name_stack(eqn))


CUSTOM_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Primitives of functions with a custom derivative."""


def derivative_of(eqn: Equation) -> ClosedJaxpr:
    """Return the program of an equation's custom derivative: its pushforward or pullback."""
    return pushforward_of(eqn) if eqn.primitive.name == "custom_jvp_call" else pullback_of(eqn)


def pushforward_of(eqn: Equation) -> ClosedJaxpr:
    """Return (primals, tangents) → (results, their tangents) of a custom_jvp equation."""
    structs = structs_of(called_jaxpr(eqn).jaxpr.invars)
    count = len(structs)

    def jvp(*primals_and_tangents: Any) -> Any:
        primals, tangents = primals_and_tangents[:count], primals_and_tangents[count:]
        out, out_tangents = jax.jvp(
            lambda *operands: bind(eqn, operands), list(primals), list(tangents)
        )
        return [*out, *out_tangents]

    return _traced_as_before(jvp, [*structs, *_tangent_structs(structs)])


def pullback_of(eqn: Equation) -> ClosedJaxpr:
    """Return (operands, cotangents of the results) → cotangents of a custom_vjp equation."""
    primal = called_jaxpr(eqn).jaxpr
    structs = structs_of(primal.invars)
    count = len(structs)

    def pullback(*operands_and_cotangents: Any) -> Any:
        primals, cotangents = operands_and_cotangents[:count], operands_and_cotangents[count:]
        _, pull = jax.vjp(lambda *operands: bind(eqn, operands), *primals)
        return list(pull(list(cotangents)))

    return _traced_as_before(pullback, [*structs, *_tangent_structs(structs_of(primal.outvars))])


def _traced_as_before(rule: Callable[..., Any], structs: Sequence[Any]) -> ClosedJaxpr:
    """Trace the user's derivative rule as when its equation was traced.

    While a program is widened, arrays without a dtype would be of 64 bits and fit nothing else.
    """
    wide = any(s.dtype in ("float64", "complex128", "int64", "uint64") for s in structs)
    with jax.enable_x64(wide):
        return jax.make_jaxpr(rule)(*structs)


def _tangent_structs(structs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    return [
        s
        if jnp.issubdtype(s.dtype, jnp.inexact)
        else jax.ShapeDtypeStruct(s.shape, jax.dtypes.float0)
        for s in structs
    ]
