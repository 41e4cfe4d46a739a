"""Rolling repeated blocks into one: proving that they are the same program on other leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.program.blocks.block_lists import BlockList
from meshwright.program.blocks.differences import Unit, difference, results_of, same_literal, unlike
from meshwright.program.blocks.repeats import repeating_parts
from meshwright.program.jaxpr.equations import (
    REARRANGES,
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
    name_stack,
)
from meshwright.program.jaxpr.names import module_of


@dataclass(frozen=True, eq=False)
class Slot:
    """Stands in a rolled block where the first block has no name of its own for a value.

    That is where blocks read different constants, and where two values that differ in other blocks
    are one in the first.
    """

    aval: Any


Name = Var | Slot


@dataclass(frozen=True)
class Carry:
    """A value handed from block to block.

    Attributes:
        initial: what the first block receives.
        enters: its name inside the first block.
        leaves: what the second block receives: a result of the first, or what that received.
        last: what the last block would hand on.
    """

    initial: Atom
    enters: Name
    leaves: Name
    last: Var


@dataclass(frozen=True)
class Rolled:
    """Blocks that are one program: the first block's equations, and how the others differ.

    Attributes:
        blocks: the list of modules.
        start: first equation of the first block.
        stop: first equation after the last block.
        before: equations within the blocks that run before all of them: each block's part of an
            outer value.
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
    before: tuple[Equation, ...]
    eqns: tuple[Equation, ...]
    constants: tuple[Var, ...]
    carries: tuple[Carry, ...]
    varying: dict[Name, tuple[Atom, ...]]
    results: dict[Var, tuple[Var, ...]]


def roll_blocks(
    jaxpr: Jaxpr, blocks: BlockList, same_leaves: Callable[[str, str], bool]
) -> Rolled | str:
    """Return the blocks as one program, or the reason why they are not one.

    Blocks of several kinds that take turns are one program when a turn is taken for a block. Of
    blocks that are not all alike, the longest run that repeats is rolled.

    Args:
        jaxpr: the program.
        blocks: modules that run one after another.
        same_leaves: whether the leaves of two modules, given by their paths, have the same roles.
    """
    found = _roll_in_turns(jaxpr, blocks)
    if isinstance(found, Rolled):
        paths = [found.blocks.block_path(n) for n in range(found.blocks.num_blocks)]
        if all(same_leaves(a, b) for a, b in pairwise(paths)):
            return found
    for part in repeating_parts(jaxpr, blocks, same_leaves):
        run = _roll_each(jaxpr, part)
        if isinstance(run, Rolled):
            return run
    return found


def _roll_in_turns(jaxpr: Jaxpr, blocks: BlockList) -> Rolled | str:
    found = _roll_each(jaxpr, blocks)
    for period in range(2, blocks.num_blocks // 2 + 1):
        if isinstance(found, Rolled):
            break
        if blocks.num_blocks % period == 0:
            grouped = blocks.grouped(period)
            rolled = _roll_each(jaxpr, grouped) if grouped.has_names else found
            found = rolled if isinstance(rolled, Rolled) else found
    return found


def _roll_each(jaxpr: Jaxpr, blocks: BlockList) -> Rolled | str:
    starts = [start for start, _ in blocks.ranges]
    length = starts[1] - starts[0]
    if any(b - a != length for a, b in pairwise(starts)):
        return _other_lengths(jaxpr, blocks)
    # What the parent does between blocks belongs to the one before or to the one after it.
    between = starts[1] - blocks.ranges[0][1]
    found = _roll_from(jaxpr, blocks, starts, length)
    for shift in range(1, min(between, starts[0]) + 1):
        if isinstance(found, Rolled):
            break
        shifted = _roll_from(jaxpr, blocks, [start - shift for start in starts], length)
        found = shifted if isinstance(shifted, Rolled) else found
    return found


def _other_lengths(jaxpr: Jaxpr, blocks: BlockList) -> str:
    """Say which block runs another number of operations than the first, and where they part."""
    starts = [start for start, _ in blocks.ranges]
    counts = [b - a for a, b in pairwise(starts)]
    index = next(n for n, count in enumerate(counts) if count != counts[0])
    first, other = (jaxpr.eqns[starts[n] : starts[n + 1]] for n in (0, index))
    shorter = min(len(first), len(other))
    differ = (n for n in range(shorter) if first[n].primitive is not other[n].primitive)
    place = next(differ, shorter)
    parts = [_operation(unit[place]) if place < len(unit) else "nothing" for unit in (other, first)]
    return (
        f"`{blocks.block_path(index)}` differs from `{blocks.block_path(0)}`: it runs "
        f"{len(other)} operations, not {len(first)}; the first to differ is "
        f"{parts[0]} against {parts[1]}"
    )


def _operation(eqn: Equation) -> str:
    module = module_of(name_stack(eqn))
    return f"{eqn.primitive.name} in `{module}`" if module else eqn.primitive.name


def _roll_from(jaxpr: Jaxpr, blocks: BlockList, starts: Sequence[int], length: int) -> Rolled | str:
    units: list[Unit] = [jaxpr.eqns[start : start + length] for start in starts]
    if len(units[-1]) < length:
        last = blocks.block_path(len(units) - 1)
        return f"`{last}` differs from `{blocks.block_path(0)}`: it runs fewer operations"
    before = _parts_of_outer_values(units)
    units = [[eqn for n, eqn in enumerate(unit) if n not in before] for unit in units]
    for index, unit in enumerate(units):
        if reason := unlike(units[0], unit):
            return f"`{blocks.block_path(index)}` differs from `{blocks.block_path(0)}`: {reason}"
    first, columns = _columns(units)
    sorted_out = _sort_out(columns, [_own(units[0], unit) for unit in units])
    if sorted_out is None:
        return f"the blocks of `{blocks.path}` use each other's results out of order"
    constants, carries, varying = sorted_out
    span = (starts[0], starts[-1] + length)
    read = _read_outside(jaxpr, span) - {carry.last for carry in carries}
    results = {
        names[0]: names
        for names in zip(*(results_of(unit) for unit in units), strict=True)
        if read.intersection(names)
    }
    hoisted = tuple(jaxpr.eqns[start + n] for start in starts for n in before)
    return Rolled(blocks, *span, hoisted, tuple(first), constants, carries, varying, results)


def _parts_of_outer_values(units: Sequence[Unit]) -> list[int]:
    """Return the equations by which each block takes another part of values from outside.

    They do not depend on any block, so their results can be there before the first one runs.
    """
    inside = {variable for unit in units for variable in results_of(unit)}
    found: list[int] = []
    for number, eqns in enumerate(zip(*units, strict=True)):
        if not all(eqn.primitive.name in REARRANGES for eqn in eqns):
            continue
        bound = any(not isinstance(a, Literal) and a in inside for e in eqns for a in e.invars)
        if not bound and any(difference(eqns[0], eqn) for eqn in eqns):
            found.append(number)
            inside.difference_update(v for eqn in eqns for v in eqn.outvars)
    return found


def _own(first: Unit, unit: Unit) -> dict[Var, Var]:
    """Return, for each result of a block, its counterpart in the first."""
    return dict(zip(results_of(unit), results_of(first), strict=True))


def _columns(units: Sequence[Unit]) -> tuple[list[Equation], dict[Name, tuple[Atom, ...]]]:
    """Name what the blocks read from outside, each block in its own place.

    Returns:
        the first block's equations with these names, and the value of each name in every block.
    """
    places: dict[tuple[int, int], tuple[Atom, ...]] = {}
    own = set(results_of(units[0]))
    for number, eqns in enumerate(zip(*units, strict=True)):
        for position, atoms in enumerate(zip(*(eqn.invars for eqn in eqns), strict=True)):
            same = all(same_literal(atoms[0], atom) for atom in atoms)
            if not same and (isinstance(atoms[0], Literal) or atoms[0] not in own):
                places[number, position] = atoms
    names = _names(list(places.values()))
    first: list[Equation] = []
    for number, eqn in enumerate(units[0]):
        operands: list[Any] = [
            names[_key(places[number, n])] if (number, n) in places else atom
            for n, atom in enumerate(eqn.invars)
        ]
        first.append(eqn if operands == eqn.invars else eqn.replace(invars=operands))
    return first, {names[_key(atoms)]: atoms for atoms in places.values()}


def _names(columns: Sequence[tuple[Atom, ...]]) -> dict[tuple[int, ...], Name]:
    """Name each value by what it is in the first block, where no other has that name."""
    names: dict[tuple[int, ...], Name] = {}
    taken: set[Var] = set()
    # A constant has but one name.
    for atoms in sorted(columns, key=lambda atoms: not _constant(atoms)):
        if _key(atoms) in names:
            continue
        name = atoms[0]
        if isinstance(name, Literal) or name in taken:
            name = Slot(aval_of(name))
        else:
            taken.add(name)
        names[_key(atoms)] = name
    return names


def _key(atoms: Sequence[Atom]) -> tuple[int, ...]:
    return tuple(map(id, atoms))


def _constant(atoms: Sequence[Atom]) -> bool:
    return not isinstance(atoms[0], Literal) and all(atom is atoms[0] for atom in atoms)


Sorted = tuple[tuple[Var, ...], tuple[Carry, ...], dict[Name, tuple[Atom, ...]]]


def _sort_out(
    columns: dict[Name, tuple[Atom, ...]], owns: Sequence[dict[Var, Var]]
) -> Sorted | None:
    """Tell apart what is the same for all blocks, handed from block to block, or each block's own.

    None where a block reads a result of another in a way that is none of these.
    """
    inside = {variable for own in owns for variable in own}
    constants: list[Var] = []
    carries: list[Carry] = []
    varying: dict[Name, tuple[Atom, ...]] = {}
    for name, atoms in columns.items():
        if _constant(atoms) and isinstance(name, Var):
            constants.append(name)
        elif not any(not isinstance(atom, Literal) and atom in inside for atom in atoms):
            varying[name] = atoms
        else:
            found = _handed_on(atoms, owns) or _handed_through(atoms, columns)
            if found is None:
                return None
            carries.append(Carry(atoms[0], name, *found))
    return tuple(constants), tuple(carries), varying


def _handed_on(atoms: Sequence[Atom], owns: Sequence[dict[Var, Var]]) -> tuple[Name, Var] | None:
    """Return the result that each next block receives, in the first block and in the last."""
    received = zip(owns, atoms[1:], strict=False)
    sources = {None if isinstance(atom, Literal) else own.get(atom) for own, atom in received}
    source = sources.pop() if len(sources) == 1 else None
    if source is None:
        return None
    return source, next(last for last, ours in owns[-1].items() if ours is source)


def _handed_through(
    atoms: Sequence[Atom], columns: dict[Name, tuple[Atom, ...]]
) -> tuple[Name, Var] | None:
    """Return what each block receives and hands on to the next as another value, likewise."""
    for name, others in columns.items():
        passed = all(a is b for a, b in zip(atoms[1:], others, strict=False))
        last = others[-1]
        if passed and others is not atoms and not isinstance(last, Literal):
            return name, last
    return None


def _read_outside(jaxpr: Jaxpr, span: tuple[int, int]) -> set[Var]:
    start, stop = span
    outside = [*jaxpr.eqns[:start], *jaxpr.eqns[stop:]]
    atoms: Iterable[Any] = [a for eqn in outside for a in eqn.invars] + list(jaxpr.outvars)
    return {atom for atom in atoms if not isinstance(atom, Literal)}
