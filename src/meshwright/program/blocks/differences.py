"""Comparing equations: whether they do the same to their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.program.blocks.crossing import (
    describe_operands,
    describe_operation,
    describe_value,
)
from meshwright.program.jaxpr.derivatives import CUSTOM_DERIVATIVES, derivative_of
from meshwright.program.jaxpr.equations import WITHOUT_RESULT, Equation, Literal, Var, aval_of


def equation_difference(left: Equation, right: Equation) -> str | None:
    """Return how two equations differ, operands aside; None if they do not."""
    names = left.primitive.name, right.primitive.name
    if left.primitive is not right.primitive:
        return f"{names[0]} against {names[1]}"
    param = _different_param(left, right)
    return f"{names[0]} has another {param}" if param else None


def shapes(eqn: Equation) -> list[tuple[Any, Any]]:
    """Return the shapes and dtypes of an equation's operands and results."""
    avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    return [(aval.shape, aval.dtype) for aval in avals]


def same_literal(left: Any, right: Any) -> bool:
    """Whether two operands are the same constant."""
    if not (isinstance(left, Literal) and isinstance(right, Literal)):
        return False
    return left.aval == right.aval and bool(
        np.array_equal(np.asarray(left.val), np.asarray(right.val))
    )


def first_difference(first: Sequence[Equation], other: Sequence[Equation]) -> str | None:
    """Return how a block differs from the first one, values from outside aside; None if not."""
    first_results = {v: n for n, v in enumerate(results_of(first))}
    other_results = {v: n for n, v in enumerate(results_of(other))}
    for a, b in zip(first, other, strict=True):
        if reason := equation_difference(a, b):
            return reason
        if shapes(a) != shapes(b):
            return f"{describe_operands(b)}, but {describe_operands(a)}"
        for left, right in zip(a.invars, b.invars, strict=True):
            if _result_number(left, first_results) != _result_number(right, other_results):
                read = describe_value(other, right), describe_value(first, left)
                return f"{describe_operation(b)} reads {read[0]}, not {read[1]}"
    return None


def results_of(eqns: Sequence[Equation]) -> list[Var]:
    """Return the variables that equations compute, in order."""
    return [variable for eqn in eqns for variable in eqn.outvars]


def _result_number(atom: Any, results: dict[Var, int]) -> int | None:
    return None if isinstance(atom, Literal) else results.get(atom)


def _different_param(left: Equation, right: Equation) -> str | None:
    """Return the name of a parameter in which two equations differ."""
    has_derivative = left.primitive.name in CUSTOM_DERIVATIVES
    if left.params.keys() != right.params.keys():
        return "set of parameters"
    for key, value in left.params.items():
        other = right.params[key]
        # Derivative rules, remat policies and debug callbacks are new function objects at each
        # call. Derivatives are compared below as programs; the others do not change results.
        is_rule = has_derivative and not (hasattr(value, "eqns") or isinstance(value, int))
        if key == "policy" or is_rule or left.primitive.name in WITHOUT_RESULT:
            continue
        if not _equal(value, other):
            return key
    if has_derivative and not _equal(derivative_of(left), derivative_of(right)):
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
