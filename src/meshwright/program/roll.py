"""Rolling repeated blocks into one: proving that they are the same program on other leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.program.blocks import BlockList
from meshwright.program.jaxprs import Equation, Jaxpr, Literal, Var


@dataclass(frozen=True)
class Carry:
    """A value handed from block to block.

    Attributes:
        initial: what the first block receives.
        enters: its name inside the first block.
        leaves: the first block's result that the second one receives.
    """

    initial: Var
    enters: Var
    leaves: Var


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
        results: per result of the first block that is read outside, its counterpart in each block.
    """

    blocks: BlockList
    start: int
    stop: int
    eqns: tuple[Equation, ...]
    constants: tuple[Var, ...]
    carries: tuple[Carry, ...]
    varying: dict[Var, tuple[Var, ...]]
    results: dict[Var, tuple[Var, ...]]


def roll_blocks(jaxpr: Jaxpr, blocks: BlockList) -> Rolled | str:
    """Return the blocks as one program, or the reason why they are not one."""
    starts = [start for start, _ in blocks.ranges]
    length = starts[1] - starts[0]
    if any(b - a != length for a, b in pairwise(starts)):
        return f"the blocks of `{blocks.path}` run different numbers of operations"
    units = [jaxpr.eqns[start : start + length] for start in starts]
    names: list[dict[Var, Var]] = []
    free: dict[Var, list[Var]] = {}
    for index, unit in enumerate(units):
        matched = _match(units[0], unit)
        if isinstance(matched, str):
            return f"`{blocks.block_path(index)}` differs from `{blocks.block_path(0)}`: {matched}"
        names.append(matched.own)
        for variable, outside in matched.free.items():
            free.setdefault(variable, []).append(outside)
    stop = starts[-1] + length
    return _assemble(jaxpr, blocks, (starts[0], stop), units[0], names, free)


def _assemble(
    jaxpr: Jaxpr,
    blocks: BlockList,
    span: tuple[int, int],
    first: Sequence[Equation],
    names: list[dict[Var, Var]],
    free: dict[Var, list[Var]],
) -> Rolled | str:
    inside = {variable for own in names for variable in own.values()}
    constants: list[Var] = []
    carries: list[Carry] = []
    varying: dict[Var, tuple[Var, ...]] = {}
    for variable, values in free.items():
        if len(set(values)) == 1:
            constants.append(variable)
        elif (result := _handed_on(values, names)) is not None:
            carries.append(Carry(values[0], variable, result))
        elif not inside.intersection(values):
            varying[variable] = tuple(values)
        else:
            return f"the blocks of `{blocks.path}` use each other's results out of order"
    read = _read_outside(jaxpr, span)
    results = {
        variable: counterparts
        for variable in names[0]
        if read.intersection(counterparts := tuple(own[variable] for own in names))
    }
    return Rolled(blocks, *span, tuple(first), tuple(constants), tuple(carries), varying, results)


def _handed_on(values: Sequence[Var], names: Sequence[dict[Var, Var]]) -> Var | None:
    """Return the first block's result that each next block receives, if it is always the same."""
    backwards = [{v: k for k, v in own.items()} for own in names[:-1]]
    sources = {own.get(value) for own, value in zip(backwards, values[1:], strict=True)}
    return sources.pop() if len(sources) == 1 else None


def _read_outside(jaxpr: Jaxpr, span: tuple[int, int]) -> set[Var]:
    start, stop = span
    outside = [*jaxpr.eqns[:start], *jaxpr.eqns[stop:]]
    atoms: Iterable[Any] = [a for eqn in outside for a in eqn.invars] + list(jaxpr.outvars)
    return {atom for atom in atoms if not isinstance(atom, Literal)}


@dataclass(frozen=True)
class _Match:
    own: dict[Var, Var]
    free: dict[Var, Var]


def _match(first: Sequence[Equation], other: Sequence[Equation]) -> _Match | str:
    own: dict[Var, Var] = {}
    free: dict[Var, Var] = {}
    if len(first) != len(other):
        return "it runs fewer operations"
    for a, b in zip(first, other, strict=True):
        if a.primitive is not b.primitive or not _same_params(a.params, b.params):
            return f"{a.primitive.name} against {b.primitive.name}"
        if [v.aval.str_short() for v in a.outvars] != [v.aval.str_short() for v in b.outvars]:
            return f"{a.primitive.name} gives another shape"
        for left, right in zip(a.invars, b.invars, strict=True):
            if isinstance(left, Literal) or isinstance(right, Literal):
                if not _same_literal(left, right):
                    return f"{a.primitive.name} has another constant"
            elif left in own:
                if own[left] is not right:
                    return f"{a.primitive.name} reads another result"
            elif free.setdefault(left, right) is not right:
                return f"{a.primitive.name} reads another value"
        own.update(zip(a.outvars, b.outvars, strict=True))
    return _Match(own, free)


def _same_literal(left: Any, right: Any) -> bool:
    if not (isinstance(left, Literal) and isinstance(right, Literal)):
        return False
    return left.aval == right.aval and bool(
        np.array_equal(np.asarray(left.val), np.asarray(right.val))
    )


def _same_params(left: dict[str, Any], right: dict[str, Any]) -> bool:
    if left.keys() != right.keys():
        return False
    for key, value in left.items():
        other = right[key]
        if value is other or (callable(value) and callable(other)):
            # Derivative rules are functions made anew at each call; their programs are compared.
            continue
        if hasattr(value, "eqns"):
            if str(value) != str(other):
                return False
        elif not _equal(value, other):
            return False
    return True


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (ValueError, TypeError):
        return bool(np.array_equal(left, right))
