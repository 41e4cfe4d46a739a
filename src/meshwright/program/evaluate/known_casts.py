"""Casts of weights that are made once, and read by what runs many times."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.jaxpr.equations import (
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    bind,
    called_jaxpr,
)

_CAST = "convert_element_type"
_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
"""Primitives that commute with a cast, as between a bias and its use."""


def dtypes_read(eqns: Iterable[Equation], inputs: Sequence[Var]) -> list[Any]:
    """Return the dtype in which a program reads each input: that of its cast to fewer bytes."""
    own = {variable: number for number, variable in enumerate(inputs)}
    dtypes = [aval_of(variable).dtype for variable in inputs]
    for eqn in eqns:
        first = eqn.invars[0] if len(eqn.invars) == 1 else None
        if first is None or isinstance(first, Literal) or first not in own:
            continue
        number, dtype = own[first], aval_of(eqn.outvars[0]).dtype
        if _move_of(eqn):
            own[eqn.outvars[0]] = number
        elif eqn.primitive.name == _CAST and dtype.itemsize < dtypes[number].itemsize:
            floats = (jnp.issubdtype(each, jnp.inexact) for each in (dtype, dtypes[number]))
            dtypes[number] = dtype if all(floats) else dtypes[number]
    return dtypes


class KnownCasts:
    """A rule that uses casts made before, for the values they were made of."""

    def __init__(self, values: Sequence[Value], casts: Sequence[Value]) -> None:
        # By identity. The values are kept, so that no other value can get the same number.
        self._casts = {
            id(value): (value, cast)
            for value, cast in zip(values, casts, strict=True)
            if value.dtype != cast.dtype
        }

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Return the cast if the equation is one of a known value."""
        known = len(eqn.invars) == 1 and self._casts.get(id(env.value(eqn.invars[0])))
        if not known:
            return None
        _, cast = known
        if eqn.primitive.name == _CAST:
            return [cast] if eqn.params["new_dtype"] == cast.dtype else None
        move = _move_of(eqn)
        if move is None:
            return None
        (moved,) = bind(eqn, env.operands(eqn))
        self._casts[id(moved)] = (moved, bind(move, [cast])[0])
        return [moved]


def _move_of(eqn: Equation) -> Equation | None:
    """Return what moves or repeats the numbers of an equation's operand, if nothing else does."""
    # Biases are repeated by a function with a derivative of its own.
    custom = eqn.primitive.name == "custom_vjp_call"
    body = called_jaxpr(eqn).jaxpr.eqns if custom else [eqn]
    return body[0] if [each.primitive.name in _MOVES for each in body] == [True] else None
