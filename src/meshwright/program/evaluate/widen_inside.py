"""Widening equations that contain programs, or that draw numbers in their own dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.jaxpr.equations import (
    ClosedJaxpr,
    Equation,
    Value,
    aval_of,
    bind,
)

_SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-sub", "scatter-min", "scatter-max")

_PROGRAMS = {
    **{name: {"update_jaxpr": "update_consts"} for name in _SCATTERS},
    "reduce": {"jaxpr": "consts"},
    "reduce_window": {"jaxpr": "consts"},
    "select_and_scatter": {
        "select_jaxpr": "select_consts",
        "scatter_jaxpr": "scatter_consts",
    },
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
        drawn = draw(*primals)
        if eqn.params["log_space"]:
            # The derivative of a logarithm is that of the number, divided by the number.
            number = jnp.exp(drawn)
            slope = _gamma_slope(primals[0], number) / number
        else:
            slope = _gamma_slope(primals[0], drawn)
        return drawn, slope * tangents[0]

    draw.defjvp(derivative)
    return [draw(alpha)]


def _gamma_slope(alpha: Any, drawn: Any) -> Any:
    # JAX wraps this function in a way that type checkers misread.
    slope: Any = jax.lax.random_gamma_grad
    return slope(alpha, drawn)


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
