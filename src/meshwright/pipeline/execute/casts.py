"""Weights cast to half precision once per update, instead of in every tick that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.pipeline.execute.slots import is_float
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.jaxpr.equations import Equation, Literal, Value, Var, aval_of, bind

CAST = "convert_element_type"
MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
"""Primitives that commute with a cast, as between a bias and its use."""


def dtypes_read(eqns: Iterable[Equation], inputs: Sequence[Var]) -> list[Any]:
    """Return the dtype in which a program reads each input: that of its cast to fewer bytes."""
    own = {variable: number for number, variable in enumerate(inputs)}
    dtypes = [aval_of(variable).dtype for variable in inputs]
    for eqn in eqns:
        first = eqn.invars[0] if len(eqn.invars) == 1 else None
        if first is None or isinstance(first, Literal) or first not in own:
            continue
        result = aval_of(eqn.outvars[0])
        if eqn.primitive.name in MOVES:
            own[eqn.outvars[0]] = own[first]
        elif eqn.primitive.name == CAST and is_float(result) and is_float(aval_of(first)):
            number = own[first]
            if result.dtype.itemsize < dtypes[number].itemsize:
                dtypes[number] = result.dtype
    return dtypes


class KnownCasts:
    """A rule that uses casts made before, for the values they were made of.

    Args:
        values: the values.
        casts: the casts of each; those of the same dtype are left out.
    """

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
        if len(eqn.invars) != 1 or not (name == CAST or name in MOVES):
            return None
        _, cast = self._casts.get(id(env.value(eqn.invars[0])), (None, None))
        if cast is None:
            return None
        if name == CAST:
            return [cast] if eqn.params["new_dtype"] == cast.dtype else None
        (moved,) = bind(eqn, env.operands(eqn))
        self._casts[id(moved)] = (moved, bind(eqn, [cast])[0])
        return [moved]
