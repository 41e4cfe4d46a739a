"""Comparing equations: whether they do the same to whatever they are given."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.program.derivatives import OWN_DERIVATIVE, derivative_of
from meshwright.program.dims.elementwise import WITHOUT_RESULT
from meshwright.program.jaxprs import Equation, Literal, aval_of


def difference(left: Equation, right: Equation) -> str | None:
    """Return how two equations differ but for their operands."""
    names = left.primitive.name, right.primitive.name
    if left.primitive is not right.primitive:
        return f"{names[0]} against {names[1]}"
    other = _other_param(left, right)
    return f"{names[0]} has another {other}" if other else None


def shapes(eqn: Equation) -> list[tuple[Any, Any]]:
    """Return the shapes and formats of what an equation reads and gives."""
    avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    return [(aval.shape, aval.dtype) for aval in avals]


def same_literal(left: Any, right: Any) -> bool:
    """Whether two operands are the same constant."""
    if not (isinstance(left, Literal) and isinstance(right, Literal)):
        return False
    return left.aval == right.aval and bool(
        np.array_equal(np.asarray(left.val), np.asarray(right.val))
    )


def _other_param(left: Equation, right: Equation) -> str | None:
    """Return the name of a parameter in which two equations differ."""
    own_derivative = left.primitive.name in OWN_DERIVATIVE
    if left.params.keys() != right.params.keys():
        return "set of parameters"
    for key, value in left.params.items():
        other = right.params[key]
        # Derivative rules, remat policies and what only tells of values are functions made anew at
        # each call; what the first do is compared below, and the others change no result.
        is_rule = own_derivative and not (hasattr(value, "eqns") or isinstance(value, int))
        if key == "policy" or is_rule or left.primitive.name in WITHOUT_RESULT:
            continue
        if not _equal(value, other):
            return key
    if own_derivative and not _equal(derivative_of(left), derivative_of(right)):
        return "derivative"
    return None


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if hasattr(left, "eqns"):
        consts = (getattr(left, "consts", ()), getattr(right, "consts", ()))
        return str(left) == str(right) and all(map(_equal, *consts))
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    try:
        return bool(left == right)
    except (ValueError, TypeError):
        return bool(np.array_equal(left, right))
