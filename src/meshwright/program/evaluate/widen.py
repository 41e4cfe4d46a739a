"""Widening a traced program to float64, including dtypes that the model fixes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.evaluate.evaluator import Environment, Evaluator, Rule
from meshwright.program.jaxpr.equations import (
    ClosedJaxpr,
    Equation,
    Numerics,
    Value,
    aval_of,
    bind,
    called_jaxpr,
    pullback_of,
    pushforward_of,
)

_SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-sub", "scatter-min", "scatter-max")

_PROGRAMS = {
    **{name: {"update_jaxpr": "update_consts"} for name in _SCATTERS},
    "reduce": {"jaxpr": "consts"},
    "reduce_window": {"jaxpr": "consts"},
    "select_and_scatter": {"select_jaxpr": "select_consts", "scatter_jaxpr": "scatter_consts"},
}
"""By primitive, the parameters that are programs, and where the constants of each are."""


def wider(dtype: Any) -> Any:
    """Return the 64-bit dtype of a narrower floating or complex dtype, None for any other."""
    if dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        return jnp.dtype(jnp.float64)
    return jnp.dtype(jnp.complex128) if dtype == jnp.complex64 else None


def widen_programs(eqn: Equation, env: Environment) -> list[Value] | None:
    """Widen what is computed inside an equation: how a scatter combines, how a system is solved."""
    name = eqn.primitive.name
    if name in _PROGRAMS:
        params = {**eqn.params, **_combiners(eqn.params, _PROGRAMS[name], env)}
    elif name == "custom_linear_solve":
        solvers = eqn.params["jaxprs"]
        widened = [None if one is None else _widened(one, env) for one in solvers]
        params = {**eqn.params, "jaxprs": type(solvers)(*widened)}
    else:
        return None
    return bind(eqn.replace(params=params), env.operands(eqn))


def widen_gamma(eqn: Equation, env: Environment) -> list[Value] | None:
    """Draw gamma variates in the program's own dtype, on which they depend, and widen them.

    Their derivative is computed in float64.
    """
    if eqn.primitive.name != "random_gamma":
        return None
    key, alpha = env.operands(eqn)
    narrow = aval_of(eqn.invars[1]).dtype

    def narrow_draw(alpha: Any) -> Any:
        (drawn,) = bind(eqn, [key, alpha.astype(narrow)])
        return drawn.astype(alpha.dtype)

    draw = jax.custom_jvp(narrow_draw)

    def derivative(primals: Any, tangents: Any) -> Any:
        drawn, is_log = draw(*primals), eqn.params["log_space"]
        number = jnp.exp(drawn) if is_log else drawn
        # JAX wraps this function in a way that type checkers misread.
        slope_of: Any = jax.lax.random_gamma_grad
        slope = slope_of(primals[0], number)
        # The derivative of a logarithm is that of the number, divided by the number.
        return drawn, (slope / number if is_log else slope) * tangents[0]

    draw.defjvp(derivative)
    return [draw(alpha)]


def _combiners(
    params: Mapping[str, Any], programs: Mapping[str, str], env: Environment
) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for program, consts in programs.items():
        if params[program] is None:
            continue
        closed = _widened(params[program], env, params[consts])
        inner = closed if isinstance(params[program], ClosedJaxpr) else closed.jaxpr
        changed |= {program: inner, consts: tuple(closed.consts)}
    return changed


def _widened(program: Any, env: Environment, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    closed = program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, tuple(consts))
    avals = [aval_of(variable) for variable in closed.jaxpr.invars]
    structs = [jax.ShapeDtypeStruct(a.shape, wider(a.dtype) or a.dtype) for a in avals]
    return jax.make_jaxpr(lambda *operands: env.run(closed, operands))(*structs)


_DTYPE_PARAMS = ("new_dtype", "dtype", "preferred_element_type")

_AS_TRACED = frozenset(
    {
        *("bitcast_convert_type", "random_bits"),
        *("pure_callback", "io_callback", "ffi_call", "pallas_call"),
    }
)
"""Computed as written, then widened: their bits matter, or code fixes the dtypes they take."""


def widen(value: Any) -> Any:
    """Return a floating or complex value as float64 or complex128, anything else as it is."""
    return jnp.asarray(value, wider(value.dtype)) if is_narrow(value) else value


def is_narrow(value: Any) -> bool:
    """Whether a value is floating point or complex and not of the widest dtype."""
    return wider(getattr(value, "dtype", None)) is not None


class Float64(Numerics):
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
        if name in _AS_TRACED:
            pairs = zip(operands, eqn.invars, strict=True)
            narrow = [jnp.asarray(a, aval_of(v).dtype) if is_narrow(a) else a for a, v in pairs]
            return [widen(out) for out in bind(eqn, narrow)]
        params = dict(eqn.params)
        for key in _DTYPE_PARAMS:
            if (dtype := wider(params.get(key))) is not None:
                params[key] = dtype
        return bind(eqn.replace(params=params), operands)


def wide_evaluator() -> Evaluator:
    """Return an evaluator that computes a program as it is written, in float64."""
    return Evaluator(WIDE_RULES, numerics=Float64())


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes in float64; its results have the dtypes they had."""

    def run(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = wide_evaluator().run(closed, jax.tree.leaves(arguments))
        structs, tree = jax.tree.flatten(shapes)
        pairs = zip(results, structs, strict=True)
        kept = [v if v.dtype == s.dtype else v.astype(s.dtype) for v, s in pairs]
        return jax.tree.unflatten(tree, kept)

    return run


def widen_derivatives(eqn: Equation, env: Environment) -> list[Value] | None:
    """Evaluate a custom_jvp or custom_vjp function, and widen its derivative too."""
    if eqn.primitive.name == "custom_jvp_call":
        return _with_pushforward(eqn, env)
    return _with_pullback(eqn, env) if eqn.primitive.name == "custom_vjp_call" else None


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

    def backward(operands: Any, cotangents: Any) -> Any:
        return tuple(env.run(pullback_of(eqn), [*operands, *cotangents]))

    function.defvjp(lambda *operands: (env.run(primal, operands), operands), backward)
    return list(function(*env.operands(eqn)))


WIDE_RULES: tuple[Rule, ...] = (widen_derivatives, widen_programs, widen_gamma)
"""The equations that are not widened by widening their operands and their dtypes."""
