"""Casts of weights that are made once, and read by what runs many times."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.jaxpr.equations import Equation, Literal, Value, Var, aval_of, bind

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
        if eqn.primitive.name in _MOVES:
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
        name = eqn.primitive.name
        if len(eqn.invars) != 1 or not (name == _CAST or name in _MOVES):
            return None
        _, cast = self._casts.get(id(env.value(eqn.invars[0])), (None, None))
        if cast is None:
            return None
        if name == _CAST:
            return [cast] if eqn.params["new_dtype"] == cast.dtype else None
        (moved,) = bind(eqn, env.operands(eqn))
        self._casts[id(moved)] = (moved, bind(eqn, [cast])[0])
        return [moved]
