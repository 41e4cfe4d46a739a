"""Rolling repeated blocks into one: proving that they are the same program on other leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.program.blocks import BlockList
from meshwright.program.derivatives import OWN_DERIVATIVE, derivative_of
from meshwright.program.jaxprs import Equation, Jaxpr, Literal, Var, aval_of


@dataclass(frozen=True, eq=False)
class Slot:
    """Stands in a rolled block where the blocks read different constants."""

    aval: Any


Name = Var | Slot
Atom = Var | Literal


@dataclass(frozen=True)
class Carry:
    """A value handed from block to block.

    Attributes:
        initial: what the first block receives.
        enters: its name inside the first block.
        leaves: the first block's result that the second one receives.
        last: the last block's result that nobody receives any more.
    """

    initial: Atom
    enters: Name
    leaves: Var
    last: Var


@dataclass(frozen=True)
class Rolled:
    """Blocks that are one program: the first block's equations, and how the others differ.

    Attributes:
        blocks: the list of modules.
        start: first equation of the first block.
        stop: first equation after the last block.
        eqns: the first block's equations.
        constants: values every block reads.
        carries: values handed from block to block.
        varying: per name in the first block, the value of each block in order.
        results: per result of the first block that is read outside, its counterpart in each block;
            what only the last block hands out is in ``carries``.
    """

    blocks: BlockList
    start: int
    stop: int
    eqns: tuple[Equation, ...]
    constants: tuple[Var, ...]
    carries: tuple[Carry, ...]
    varying: dict[Name, tuple[Atom, ...]]
    results: dict[Var, tuple[Var, ...]]


def roll_blocks(jaxpr: Jaxpr, blocks: BlockList) -> Rolled | str:
    """Return the blocks as one program, or the reason why they are not one."""
    starts = [start for start, _ in blocks.ranges]
    length = starts[1] - starts[0]
    if any(b - a != length for a, b in pairwise(starts)):
        return f"the blocks of `{blocks.path}` run different numbers of operations"
    # What the parent does between blocks belongs to the one before or to the one after it.
    between = starts[1] - blocks.ranges[0][1]
    found = _roll_from(jaxpr, blocks, starts, length)
    for shift in range(1, min(between, starts[0]) + 1):
        if isinstance(found, Rolled):
            break
        shifted = _roll_from(jaxpr, blocks, [start - shift for start in starts], length)
        found = shifted if isinstance(shifted, Rolled) else found
    return found


def _roll_from(jaxpr: Jaxpr, blocks: BlockList, starts: Sequence[int], length: int) -> Rolled | str:
    units = [jaxpr.eqns[start : start + length] for start in starts]
    if len(units[-1]) < length:
        last = blocks.block_path(len(units) - 1)
        return f"`{last}` differs from `{blocks.block_path(0)}`: it runs fewer operations"
    first = _with_slots(units)
    names: list[dict[Var, Var]] = []
    free: dict[Name, list[Atom]] = {}
    for index, unit in enumerate(units):
        matched = _match(first, unit)
        if isinstance(matched, str):
            return f"`{blocks.block_path(index)}` differs from `{blocks.block_path(0)}`: {matched}"
        names.append(matched.own)
        for variable, outside in matched.free.items():
            free.setdefault(variable, []).append(outside)
    span = (starts[0], starts[-1] + length)
    return _assemble(jaxpr, blocks, span, first, names, free)


def _with_slots(units: Sequence[Sequence[Equation]]) -> list[Equation]:
    """Return the first unit with a slot in place of every constant that others have otherwise."""
    first: list[Equation] = []
    for eqn, *others in zip(*units, strict=True):
        atoms = list(eqn.invars)
        for position, atom in enumerate(atoms):
            rest = [other.invars[position] for other in others if position < len(other.invars)]
            if isinstance(atom, Literal) and not all(_same_literal(atom, r) for r in rest):
                atoms[position] = Slot(atom.aval)
        first.append(eqn if atoms == eqn.invars else eqn.replace(invars=atoms))
    return first


def _assemble(
    jaxpr: Jaxpr,
    blocks: BlockList,
    span: tuple[int, int],
    first: Sequence[Equation],
    names: list[dict[Var, Var]],
    free: dict[Name, list[Atom]],
) -> Rolled | str:
    inside = {variable for own in names for variable in own.values()}
    constants: list[Var] = []
    carries: list[Carry] = []
    varying: dict[Name, tuple[Atom, ...]] = {}
    for variable, values in free.items():
        if isinstance(variable, Var) and all(value is values[0] for value in values):
            constants.append(variable)
        elif (result := _handed_on(values, names)) is not None:
            carries.append(Carry(values[0], variable, result, names[-1][result]))
        elif not any(not isinstance(value, Literal) and value in inside for value in values):
            varying[variable] = tuple(values)
        else:
            return f"the blocks of `{blocks.path}` use each other's results out of order"
    read = _read_outside(jaxpr, span) - {carry.last for carry in carries}
    results = {
        variable: counterparts
        for variable in names[0]
        if read.intersection(counterparts := tuple(own[variable] for own in names))
    }
    return Rolled(blocks, *span, tuple(first), tuple(constants), tuple(carries), varying, results)


def _handed_on(values: Sequence[Atom], names: Sequence[dict[Var, Var]]) -> Var | None:
    """Return the first block's result that each next block receives, if it is always the same."""
    sources: set[Var | None] = set()
    for own, value in zip(names[:-1], values[1:], strict=True):
        sources.add(next((ours for ours, theirs in own.items() if theirs is value), None))
    return sources.pop() if len(sources) == 1 else None


def _read_outside(jaxpr: Jaxpr, span: tuple[int, int]) -> set[Var]:
    start, stop = span
    outside = [*jaxpr.eqns[:start], *jaxpr.eqns[stop:]]
    atoms: Iterable[Any] = [a for eqn in outside for a in eqn.invars] + list(jaxpr.outvars)
    return {atom for atom in atoms if not isinstance(atom, Literal)}


@dataclass(frozen=True)
class _Match:
    own: dict[Var, Var]
    free: dict[Name, Atom]


def _match(first: Sequence[Equation], other: Sequence[Equation]) -> _Match | str:
    own: dict[Var, Var] = {}
    free: dict[Name, Atom] = {}
    for a, b in zip(first, other, strict=True):
        if a.primitive is not b.primitive or not _same_params(a, b):
            return f"{a.primitive.name} against {b.primitive.name}"
        if _shapes(a) != _shapes(b):
            return f"{a.primitive.name} works on another shape"
        for left, right in zip(a.invars, b.invars, strict=True):
            if isinstance(left, Literal):
                continue
            if left in own:
                if own[left] is not right:
                    return f"{a.primitive.name} reads another result"
            elif free.setdefault(left, right) is not right:
                return f"{a.primitive.name} reads another value"
        own.update(zip(a.outvars, b.outvars, strict=True))
    return _Match(own, free)


def _shapes(eqn: Equation) -> list[tuple[Any, Any]]:
    avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    return [(aval.shape, aval.dtype) for aval in avals]


def _same_literal(left: Any, right: Any) -> bool:
    if not (isinstance(left, Literal) and isinstance(right, Literal)):
        return False
    return left.aval == right.aval and bool(
        np.array_equal(np.asarray(left.val), np.asarray(right.val))
    )


def _same_params(left: Equation, right: Equation) -> bool:
    own_derivative = left.primitive.name in OWN_DERIVATIVE
    if left.params.keys() != right.params.keys():
        return False
    for key, value in left.params.items():
        other = right.params[key]
        # Derivative rules and remat policies are functions made anew at each call; what the
        # former do is compared below, and the latter change no result.
        is_rule = own_derivative and not (hasattr(value, "eqns") or isinstance(value, int))
        if key == "policy" or is_rule:
            continue
        if not _equal(value, other):
            return False
    return not own_derivative or _equal(derivative_of(left), derivative_of(right))


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
