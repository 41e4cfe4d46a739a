"""Blocks that are rows of stacked arrays: a Python loop that indexes its weights by number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.program.blocks.block_lists import BlockList
from meshwright.program.blocks.prove_equal import Column, RolledBlockList, roll_with_shifts
from meshwright.program.evaluate.dependencies import variables, variables_read
from meshwright.program.jaxpr.equations import Equation, Jaxpr, Literal, Var, aval_of
from meshwright.program.trace.traced_loss import TracedLoss

Rows = Mapping[Var, tuple[Var, int]]
"""By variable that is a row of a stacked array, that array and the number of the row."""


@dataclass(frozen=True)
class RowBlocks:
    """A program whose blocks, rolled into one, read rows of stacked arrays.

    The equations that take the rows are left out.
    """

    traced: TracedLoss
    rolled: RolledBlockList
    rows: Rows


def roll_rows(traced: TracedLoss) -> RowBlocks | str | None:
    """Return the blocks of a loop over rows, or why they are not equal; None if there is none."""
    leaves = dict(zip(traced.closed.jaxpr.invars, traced.leaves, strict=False))
    jaxpr, rows = _without_row_reads(traced.closed.jaxpr, list(leaves))
    if not rows:
        return None
    array = max((a for a, _ in rows.values()), key=lambda a: aval_of(a).size)
    path = leaves[array].path if array in leaves else "rows"
    count = aval_of(array).shape[0]
    ranges = [_range_of(jaxpr, rows, number) for number in range(count)]
    for number, (one, other) in enumerate(pairwise(ranges)):
        if one[1] > other[0]:
            return f"row {number} of `{path}` is used again after row {number + 1}"
    elements = tuple(f"{path}.{number}" for number in range(count))
    rolled = roll_with_shifts(jaxpr, BlockList(f"{path}.*", elements, tuple(ranges)))
    if isinstance(rolled, str):
        return rolled
    if not _only_blocks_read(jaxpr, rolled, rows):
        return f"rows of `{path}` are read outside of the loop over them too"
    closed = traced.closed.replace(jaxpr=jaxpr)
    return RowBlocks(replace(traced, closed=closed), rolled, rows)


def array_of(atoms: Column, rows: Rows) -> Var | None:
    """Return the array whose rows, all of them in order, are what each block reads."""
    found = [None if isinstance(atom, Literal) else rows.get(atom) for atom in atoms]
    if found[0] is None:
        return None
    array = found[0][0]
    every = [(array, number) for number in range(aval_of(array).shape[0])]
    return array if found == every else None


def _without_row_reads(jaxpr: Jaxpr, leaves: Sequence[Var]) -> tuple[Jaxpr, Rows]:
    """Return the program without the equations that take rows, and these rows.

    Arrays count if all their rows are taken, and if they have as many as the largest of them.
    """
    rows, takers = _row_reads(jaxpr, leaves)
    numbers: dict[Var, set[int]] = {}
    for array, number in rows.values():
        numbers.setdefault(array, set()).add(number)
    whole = [a for a, taken in numbers.items() if len(taken) == aval_of(a).shape[0] > 1]
    if not whole:
        return jaxpr, {}
    count = aval_of(max(whole, key=lambda a: aval_of(a).size)).shape[0]
    chosen = {a for a in whole if aval_of(a).shape[0] == count}
    left = [eqn for number, eqn in enumerate(jaxpr.eqns) if takers.get(number) not in chosen]
    known = {row: source for row, source in rows.items() if source[0] in chosen}
    removed = {
        v for n, eqn in enumerate(jaxpr.eqns) if takers.get(n) in chosen for v in eqn.outvars
    }
    if not (removed - known.keys()).isdisjoint(variables_read(left)):
        return jaxpr, {}
    return jaxpr.replace(eqns=left), known


def _row_reads(jaxpr: Jaxpr, leaves: Sequence[Var]) -> tuple[Rows, dict[int, Var]]:
    """Return the rows of leaves and their casts, and by number of an equation, whose it takes."""
    arrays = set(leaves)
    slices: dict[Var, tuple[Var, int]] = {}
    rows: dict[Var, tuple[Var, int]] = {}
    takers: dict[int, Var] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        source, name = eqn.invars[0] if eqn.invars else None, eqn.primitive.name
        if source is None or isinstance(source, Literal):
            continue
        if name == "convert_element_type" and source in arrays:
            arrays.add(eqn.outvars[0])
        elif name == "unstack" and source in arrays and eqn.params["axis"] == 0:
            rows.update((row, (source, n)) for n, row in enumerate(eqn.outvars))
            takers[number] = source
        elif name == "slice" and source in arrays and _is_row(eqn):
            slices[eqn.outvars[0]] = source, eqn.params["start_indices"][0]
            takers[number] = source
        elif name == "squeeze" and source in slices and tuple(eqn.params["dimensions"]) == (0,):
            rows[eqn.outvars[0]] = slices[source]
            takers[number] = slices[source][0]
    return rows, takers


def _is_row(eqn: Equation) -> bool:
    shape, out = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    return len(shape) > 0 and out == (1, *shape[1:])


def _range_of(jaxpr: Jaxpr, rows: Rows, number: int) -> tuple[int, int]:
    """Return the equations from the first to the last that read rows of this number."""
    readers = [
        n
        for n, eqn in enumerate(jaxpr.eqns)
        if any(rows[v][1] == number for v in variables(eqn.invars) if v in rows)
    ]
    return (readers[0], readers[-1] + 1) if readers else (0, 0)


def _only_blocks_read(jaxpr: Jaxpr, rolled: RolledBlockList, rows: Rows) -> bool:
    """Whether each row is read by its own block alone."""
    outside = [*jaxpr.eqns[: rolled.start], *rolled.hoisted, *jaxpr.eqns[rolled.stop :]]
    read = {*variables_read(outside), *variables(jaxpr.outvars), *rolled.constants}
    read.update(variables(carry.initial for carry in rolled.carries))
    columns = [c for c in rolled.varying.values() if not rows.keys().isdisjoint(variables(c))]
    arrays = [array_of(column, rows) for column in columns]
    return bool(columns) and None not in arrays and read.isdisjoint(rows)
