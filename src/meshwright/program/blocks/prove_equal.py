"""Proving that repeated blocks are the same program on other leaves, to roll them into one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from meshwright.program.blocks.block_lists import BlockList
from meshwright.program.blocks.differences import (
    describe_jump,
    describe_operation,
    equation_difference,
    first_difference,
    repeating_parts,
    results_of,
    same_literal,
)
from meshwright.program.evaluate.dependencies import variables, variables_read
from meshwright.program.jaxpr.equations import (
    REARRANGES,
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
)


@dataclass(frozen=True, eq=False)
class Placeholder:
    """The name of a value in a rolled block for which the first block has no variable.

    This happens if blocks read different constants, and if two values that differ in other blocks
    are the same variable in the first.
    """

    aval: Any


Name = Var | Placeholder
"""The name of a value in a rolled block."""

Column = tuple[Atom, ...]
"""What one name stands for in each block, in order."""


@dataclass(frozen=True)
class Carry:
    """A value passed from block to block: ``initial`` is what the first block receives.

    The names are those of what the rolled block receives and passes on: a result, or another
    received value.
    """

    initial: Atom
    received: Name
    passed_on: Name
    final: Var


@dataclass(frozen=True)
class RolledBlockList:
    """Equal blocks as one program: the first block's equations, and each block's operands.

    Attributes:
        start: first equation of the first block.
        stop: first equation after the last block.
        hoisted: equations of the blocks that run before the first one: each takes its block's
            part of a value from outside.
        constants: values that every block reads.
        carries: values passed from block to block.
        varying: by name, the value that each block reads.
        results: by result of the first block that is read outside, its counterpart in each block;
            what only the last block returns is in ``carries``.
        why_not_all: why other blocks of a longer list are not part of it, if that is known.
    """

    blocks: BlockList
    start: int
    stop: int
    hoisted: tuple[Equation, ...]
    eqns: tuple[Equation, ...]
    constants: tuple[Var, ...]
    carries: tuple[Carry, ...]
    varying: dict[Name, Column]
    results: dict[Var, tuple[Var, ...]]
    why_not_all: str = ""


def roll_block_list(
    jaxpr: Jaxpr, blocks: BlockList, same_leaves: Callable[[str, str], bool]
) -> RolledBlockList | str:
    """Return the blocks as one program, or the reason why they are not equal.

    If several kinds of blocks alternate, one of each is rolled as one block. If not all blocks are
    equal, the longest run that repeats is rolled. ``same_leaves`` says whether the leaves of two
    modules, given by their paths, have the same roles.
    """
    whole = _roll_with_periods(jaxpr, blocks)
    if isinstance(whole, RolledBlockList):
        paths = [whole.blocks.block_path(n) for n in range(whole.blocks.num_blocks)]
        if all(same_leaves(a, b) for a, b in pairwise(paths)):
            return whole
    for part in repeating_parts(jaxpr, blocks, same_leaves):
        run = roll_with_shifts(jaxpr, part)
        if isinstance(run, RolledBlockList):
            return replace(run, why_not_all=whole if isinstance(whole, str) else "")
    return whole


def _roll_with_periods(jaxpr: Jaxpr, blocks: BlockList) -> RolledBlockList | str:
    """Roll blocks, or groups of blocks if several kinds alternate."""
    rolled = roll_with_shifts(jaxpr, blocks)
    for period in range(2, blocks.num_blocks // 2 + 1):
        if isinstance(rolled, RolledBlockList):
            break
        grouped = blocks.grouped(period) if blocks.num_blocks % period == 0 else None
        if grouped and grouped.has_unique_patterns:
            groups = roll_with_shifts(jaxpr, grouped)
            rolled = groups if isinstance(groups, RolledBlockList) else rolled
    return rolled


def roll_with_shifts(jaxpr: Jaxpr, blocks: BlockList) -> RolledBlockList | str:
    """Roll blocks; the parent's equations between two count as part of either."""
    starts = [start for start, _ in blocks.ranges]
    length = starts[1] - starts[0]
    if any(b - a != length for a, b in pairwise(starts)):
        return _different_lengths(jaxpr, blocks)
    between = starts[1] - blocks.ranges[0][1]
    rolled = _roll_at(jaxpr, blocks, starts, length)
    for shift in range(1, min(between, starts[0]) + 1):
        if isinstance(rolled, RolledBlockList):
            break
        shifted = _roll_at(jaxpr, blocks, [start - shift for start in starts], length)
        rolled = shifted if isinstance(shifted, RolledBlockList) else rolled
    return rolled


def _different_lengths(jaxpr: Jaxpr, blocks: BlockList) -> str:
    """Say which block runs more or fewer operations than the first, and where they differ."""
    starts = [start for start, _ in blocks.ranges]
    counts = [b - a for a, b in pairwise(starts)]
    index = next(n for n, count in enumerate(counts) if count != counts[0])
    first, other = (jaxpr.eqns[starts[n] : starts[n + 1]] for n in (0, index))
    shorter = min(len(first), len(other))
    differ = (n for n in range(shorter) if first[n].primitive is not other[n].primitive)
    number = next(differ, shorter)
    operations = [
        describe_operation(eqns[number]) if number < len(eqns) else "nothing"
        for eqns in (other, first)
    ]
    return (
        f"`{blocks.block_path(index)}` differs from `{blocks.block_path(0)}`: it runs "
        f"{len(other)} operations, not {len(first)}; the first to differ is "
        f"{operations[0]} against {operations[1]}"
    )


def _roll_at(
    jaxpr: Jaxpr, blocks: BlockList, starts: Sequence[int], length: int
) -> RolledBlockList | str:
    """Roll blocks that start at these equations and have this many equations each."""
    first_path = blocks.block_path(0)
    bodies: list[Sequence[Equation]] = [jaxpr.eqns[start : start + length] for start in starts]
    if len(bodies[-1]) < length:
        last = blocks.block_path(len(bodies) - 1)
        return f"`{last}` differs from `{first_path}`: it runs fewer operations"
    hoisted = _parts_of_outer_values(bodies)
    bodies = [[eqn for n, eqn in enumerate(body) if n not in hoisted] for body in bodies]
    for index, body in enumerate(bodies):
        if reason := first_difference(bodies[0], body):
            return f"`{blocks.block_path(index)}` differs from `{first_path}`: {reason}"
    eqns, columns = _name_operands(bodies)
    results = [results_of(body) for body in bodies]
    # By block, the counterpart of each of its results in the first block.
    operands = _classify(columns, [dict(zip(own, results[0], strict=True)) for own in results])
    if not isinstance(operands, _Operands):
        paths = [blocks.block_path(index) for index in range(len(bodies))]
        jump = describe_jump(paths, bodies, operands)
        return f"the blocks of `{blocks.path}` use each other's results out of order: {jump}"
    span = (starts[0], starts[-1] + length)
    outside = [*jaxpr.eqns[: span[0]], *jaxpr.eqns[span[1] :]]
    read = {*variables_read(outside), *variables(jaxpr.outvars)}
    read -= {carry.final for carry in operands.carries}
    counterparts = zip(*results, strict=True)
    return RolledBlockList(
        blocks=blocks,
        start=span[0],
        stop=span[1],
        hoisted=tuple(jaxpr.eqns[start + n] for start in starts for n in hoisted),
        eqns=tuple(eqns),
        constants=operands.constants,
        carries=operands.carries,
        varying=operands.varying,
        results={same[0]: same for same in counterparts if read.intersection(same)},
    )


def _parts_of_outer_values(bodies: Sequence[Sequence[Equation]]) -> list[int]:
    """Return the numbers of the equations that take another part of a value in each block.

    The value is from outside, so the parts can be computed before the first block runs.
    """
    inside = {variable for body in bodies for variable in results_of(body)}
    numbers: list[int] = []
    for number, eqns in enumerate(zip(*bodies, strict=True)):
        if not all(eqn.primitive.name in REARRANGES for eqn in eqns):
            continue
        independent = inside.isdisjoint(variables_read(eqns))
        if independent and any(equation_difference(eqns[0], eqn) for eqn in eqns):
            numbers.append(number)
            inside.difference_update(v for eqn in eqns for v in eqn.outvars)
    return numbers


def _name_operands(
    bodies: Sequence[Sequence[Equation]],
) -> tuple[list[Equation], dict[Name, Column]]:
    """Name the values that blocks read from outside.

    Returns:
        the first block's equations with these names, and what each name is in every block.
    """
    columns = outer_columns(bodies)
    names = _names(list(columns.values()))
    renamed: list[Equation] = []
    for number, eqn in enumerate(bodies[0]):
        operands: list[Any] = [
            names[_key(columns[number, n])] if (number, n) in columns else atom
            for n, atom in enumerate(eqn.invars)
        ]
        renamed.append(eqn if operands == eqn.invars else eqn.replace(invars=operands))
    return renamed, {names[_key(atoms)]: atoms for atoms in columns.values()}


def outer_columns(bodies: Sequence[Sequence[Equation]]) -> dict[tuple[int, int], Column]:
    """Return, by equation and position, the operands that blocks read from outside."""
    columns: dict[tuple[int, int], Column] = {}
    computed = set(results_of(bodies[0]))
    for number, eqns in enumerate(zip(*bodies, strict=True)):
        for position, atoms in enumerate(zip(*(eqn.invars for eqn in eqns), strict=True)):
            same = all(same_literal(atoms[0], atom) for atom in atoms)
            if not same and (isinstance(atoms[0], Literal) or atoms[0] not in computed):
                columns[number, position] = atoms
    return columns


def _names(columns: Sequence[Column]) -> dict[tuple[int, ...], Name]:
    """Name each value by its variable in the first block, if that is not taken."""
    names: dict[tuple[int, ...], Name] = {}
    taken: set[Var] = set()
    # Constants come first, because they must have the name of their variable.
    for atoms in sorted(columns, key=lambda atoms: not _is_constant(atoms)):
        if _key(atoms) in names:
            continue
        name = atoms[0]
        if isinstance(name, Literal) or name in taken:
            name = Placeholder(aval_of(name))
        else:
            taken.add(name)
        names[_key(atoms)] = name
    return names


def _key(atoms: Sequence[Atom]) -> tuple[int, ...]:
    return tuple(map(id, atoms))


def _is_constant(atoms: Sequence[Atom]) -> bool:
    """Whether a value is the same variable in all blocks."""
    return not isinstance(atoms[0], Literal) and all(atom is atoms[0] for atom in atoms)


class _Operands(NamedTuple):
    """What blocks read from outside, as in `RolledBlockList`."""

    constants: tuple[Var, ...]
    carries: tuple[Carry, ...]
    varying: dict[Name, Column]


def _classify(
    columns: dict[Name, Column], counterparts: Sequence[dict[Var, Var]]
) -> _Operands | Column:
    """Divide operands into constants, values passed from block to block, and varying values.

    If a block reads a result of another block in any other way, return what each block reads there.
    """
    inside = {variable for results in counterparts for variable in results}
    constants: list[Var] = []
    carries: list[Carry] = []
    varying: dict[Name, Column] = {}
    for name, atoms in columns.items():
        if _is_constant(atoms) and isinstance(name, Var):
            constants.append(name)
        elif not any(not isinstance(atom, Literal) and atom in inside for atom in atoms):
            varying[name] = atoms
        else:
            passed = _passed_result(atoms, counterparts) or _passed_operand(atoms, columns)
            if passed is None:
                return atoms
            carries.append(Carry(atoms[0], name, *passed))
    return _Operands(tuple(constants), tuple(carries), varying)


def _passed_result(
    atoms: Sequence[Atom], counterparts: Sequence[dict[Var, Var]]
) -> tuple[Name, Var] | None:
    """Return the result that each next block receives, in the first block and in the last."""
    received = zip(counterparts, atoms[1:], strict=False)
    sources = {None if isinstance(a, Literal) else results.get(a) for results, a in received}
    source = sources.pop() if len(sources) == 1 else None
    if source is None:
        return None
    return source, next(v for v, in_first in counterparts[-1].items() if in_first is source)


def _passed_operand(atoms: Sequence[Atom], columns: dict[Name, Column]) -> tuple[Name, Var] | None:
    """Return another operand that each next block receives unchanged, likewise."""
    for name, others in columns.items():
        passed = all(a is b for a, b in zip(atoms[1:], others, strict=False))
        last = others[-1]
        if passed and others is not atoms and not isinstance(last, Literal):
            return name, last
    return None
