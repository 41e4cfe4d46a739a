"""The derivative programs of custom_jvp and custom_vjp functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.jaxpr.equations import ClosedJaxpr, Equation, bind, called_jaxpr, structs_of

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

    return jax.make_jaxpr(jvp)(*structs, *_tangent_structs(structs))


def pullback_of(eqn: Equation) -> ClosedJaxpr:
    """Return (operands, cotangents of the results) → cotangents of a custom_vjp equation."""
    primal = called_jaxpr(eqn).jaxpr
    structs = structs_of(primal.invars)
    count = len(structs)

    def pullback(*operands_and_cotangents: Any) -> Any:
        primals, cotangents = operands_and_cotangents[:count], operands_and_cotangents[count:]
        _, pull = jax.vjp(lambda *operands: bind(eqn, operands), *primals)
        return list(pull(list(cotangents)))

    return jax.make_jaxpr(pullback)(*structs, *_tangent_structs(structs_of(primal.outvars)))


def _tangent_structs(structs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    return [
        s
        if jnp.issubdtype(s.dtype, jnp.inexact)
        else jax.ShapeDtypeStruct(s.shape, jax.dtypes.float0)
        for s in structs
    ]
