"""Comparing blocks: how their equations differ, said in words, and which runs of blocks repeat."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.program.blocks.block_lists import BlockList
from meshwright.program.jaxpr.equations import (
    CUSTOM_DERIVATIVES,
    REARRANGES,
    WITHOUT_RESULT,
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
    derivative_of,
    equation_module,
)


def describe_operation(eqn: Equation) -> str:
    """Return the operation and the module it belongs to."""
    module = equation_module(eqn)
    return f"{eqn.primitive.name} in `{module}`" if module else eqn.primitive.name


def describe_value(eqns: Iterable[Equation], atom: Atom) -> str:
    """Return the shape of a value, and where it is computed if one of the equations does."""
    maker = next((eqn for eqn in eqns if atom in eqn.outvars), None)
    text = f"a value of shape {list(aval_of(atom).shape)}"
    return f"{text}, made by {describe_operation(maker)}" if maker else text


def first_reader(eqns: Iterable[Equation], variable: Var) -> Equation | None:
    """Return the first equation that reads a variable."""
    return next((eqn for eqn in eqns if any(atom is variable for atom in eqn.invars)), None)


def user_of(eqns: Sequence[Equation], variable: Var) -> Equation | None:
    """Return the first equation that computes with a variable, or with a part of it."""
    reader = first_reader(eqns, variable)
    while reader and reader.primitive.name in REARRANGES:
        further = first_reader(eqns, reader.outvars[0])
        if further is None:
            break
        reader = further
    return reader


def describe_jump(
    paths: Sequence[str], bodies: Sequence[Sequence[Equation]], column: Sequence[Atom]
) -> str:
    """Say which block reads which value of another block than the one before it.

    ``column`` is, by block, the operand that it reads at one place.
    """
    owners = [_owner(bodies, atom) for atom in column]
    usual = owners[1] is not None and 1 - owners[1]
    reader = next(
        (n for n, owner in enumerate(owners) if n and (owner is None or n - owner != usual)),
        len(owners) - 1,
    )
    atom, owner = column[reader], owners[reader]
    made = [eqn for body in bodies for eqn in body]
    where = first_reader(bodies[reader], atom) if isinstance(atom, Var) else None
    reads = f"`{paths[reader]}`" + (f" ({describe_operation(where)})" if where else "")
    source = f"of `{paths[owner]}`" if owner is not None else "from before the blocks"
    return (
        f"{reads} reads {describe_value(made, atom)}, {source}, where `{paths[1]}` reads "
        f"{describe_value(made, column[1])}"
    )


def describe_operands(eqn: Equation) -> str:
    """Return an operation with the shapes and types of what it reads."""
    reads = [f"{aval_of(atom).dtype} {list(aval_of(atom).shape)}" for atom in eqn.invars]
    return f"{describe_operation(eqn)} reads {' and '.join(reads) or 'nothing'}"


def _owner(bodies: Sequence[Sequence[Equation]], atom: Atom) -> int | None:
    """Return the number of the block that computes a value; None if none does."""
    if isinstance(atom, Literal):
        return None
    numbered = enumerate(bodies)
    return next((n for n, body in numbered if any(atom in eqn.outvars for eqn in body)), None)


def equation_difference(left: Equation, right: Equation) -> str | None:
    """Return how two equations differ, operands aside; None if they do not."""
    names = left.primitive.name, right.primitive.name
    if left.primitive is not right.primitive:
        return f"{names[0]} against {names[1]}"
    param = _different_param(left, right)
    return f"{names[0]} has another {param}" if param else None


def is_like(one: Equation, other: Equation) -> bool:
    """Whether two equations are the same, operands aside, on the same shapes."""
    return shapes(one) == shapes(other) and equation_difference(one, other) is None


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


def repeating_parts(
    jaxpr: Jaxpr, blocks: BlockList, same_leaves: Callable[[str, str], bool]
) -> Iterator[BlockList]:
    """Yield the parts of a list in which blocks repeat, the longest first."""
    paths = [blocks.block_path(n) for n in range(blocks.num_blocks)]
    kinds = _kinds(
        [jaxpr.eqns[start:stop] for start, stop in blocks.ranges],
        lambda one, other: same_leaves(paths[one], paths[other]),
    )
    # Two blocks in a row, with the parent's equations between them.
    pairs = _kinds([jaxpr.eqns[a[0] : b[1]] for a, b in pairwise(blocks.ranges)])
    periods = range(1, len(kinds) // 2 + 1)
    runs = [(period, *longest_run(kinds, pairs, period)) for period in periods]
    # If the parent's equations after each block count as part of it, the last block lacks them.
    runs += [(period, first, count - period) for period, first, count in runs]
    for period, first, count in sorted(runs, key=lambda run: (-run[2], run[0])):
        part = blocks.part(first, count).grouped(period)
        if part.num_blocks > 1 and part.has_unique_patterns:
            yield part


def _kinds(
    blocks: Sequence[Sequence[Equation]], same: Callable[[int, int], bool] = lambda one, other: True
) -> list[int]:
    """Return, for each block, the number of the first block that is equal to it."""
    kinds: list[int] = []
    for number, eqns in enumerate(blocks):
        equal = (
            kind
            for kind in dict.fromkeys(kinds)
            if len(blocks[kind]) == len(eqns)
            and same(kind, number)
            and not first_difference(blocks[kind], eqns)
        )
        kinds.append(next(equal, number))
    return kinds


def longest_run(kinds: Sequence[int], pairs: Sequence[int], period: int) -> tuple[int, int]:
    """Return the first block and the length of the longest run that repeats with a period.

    Blocks have kinds, and so have pairs of consecutive blocks; runs are whole multiples of the
    period.
    """
    best, first = (0, 0), 0
    for last in range(len(kinds)):
        before = last - period
        if before >= first and kinds[last] != kinds[before]:
            first = before + 1
        elif before > first and pairs[last - 1] != pairs[before - 1]:
            first = before
        best = max(best, ((last - first + 1) // period * period, -first))
    return -best[1], best[0]
