"""Comparing equations: whether they do the same to whatever they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.program.jaxpr.derivatives import CUSTOM_DERIVATIVES, derivative_of
from meshwright.program.jaxpr.equations import WITHOUT_RESULT, Equation, Literal, Var, aval_of

Unit = Sequence[Equation]
"""Equations in a row."""


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


def unlike(first: Unit, other: Unit) -> str | None:
    """Return how a block differs from the first but for the values it reads from outside."""
    ours, theirs = ({v: n for n, v in enumerate(results_of(unit))} for unit in (first, other))
    for a, b in zip(first, other, strict=True):
        if reason := difference(a, b):
            return reason
        if shapes(a) != shapes(b):
            return f"{a.primitive.name} works on another shape"
        for left, right in zip(a.invars, b.invars, strict=True):
            if _source(left, ours) != _source(right, theirs):
                return f"{a.primitive.name} reads another result"
    return None


def results_of(unit: Unit) -> list[Var]:
    """Return what a unit computes, in order."""
    return [variable for eqn in unit for variable in eqn.outvars]


def _source(atom: Any, results: dict[Var, int]) -> int | None:
    return None if isinstance(atom, Literal) else results.get(atom)


def _other_param(left: Equation, right: Equation) -> str | None:
    """Return the name of a parameter in which two equations differ."""
    own_derivative = left.primitive.name in CUSTOM_DERIVATIVES
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
