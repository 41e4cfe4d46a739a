"""Which values connections of blocks pass along until they are read, and in which slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.program.blocks.differences import results_of
from meshwright.program.evaluate.dependencies import (
    dependent_variables,
    inputs_of,
    variables,
    variables_read,
)
from meshwright.program.jaxpr.equations import Atom, Equation, Jaxpr, Var, aval_of


@dataclass(frozen=True)
class ConnectionValues:
    """What the connections of blocks read, and where it is until then.

    Attributes:
        constants: values from before the blocks that connections read and every stage can compute.
        before: by result of blocks that connections read, what the first connection gets instead.
        results: by block, these results.
        slots: the shape and dtype of each slot.
        slot_of: by variable, the number of its slot.
        kept: the variables in slots when each connection starts; last, those after all blocks.
    """

    constants: tuple[Var, ...]
    before: tuple[Var | None, ...]
    results: tuple[tuple[Var, ...], ...]
    slots: tuple[Any, ...]
    slot_of: dict[Var, int]
    kept: tuple[tuple[Var, ...], ...]


def connection_values(
    jaxpr: Jaxpr,
    num_leaves: int,
    span: tuple[int, int],
    bodies: Sequence[Sequence[Equation]],
    connections: Sequence[Sequence[Equation]],
    received: Sequence[Sequence[Atom]],
) -> ConnectionValues:
    """Find the values that connections read, and assign slots to them.

    Args:
        jaxpr: the program.
        num_leaves: how many of its inputs are leaves of the model.
        span: the equations from the first block to the last, as [start, stop).
        bodies: the equations of each block.
        connections: the equations before each block.
        received: by value that blocks receive from connections, its variable in each block.
    """
    every = [results_of(body) for body in bodies]
    of_blocks = {v: b for b, results in enumerate(every) for v in results}
    of_connections = {
        v: b for b, connection in enumerate(connections) for v in results_of(connection)
    }
    last = _last_reads(jaxpr.eqns[span[1] :], jaxpr.outvars, connections, received, of_connections)
    positions = [n for n in range(len(every[0])) if any(results[n] in last for results in every)]
    outside = [v for v in last if v not in of_blocks and v not in of_connections]
    samples = dependent_variables(jaxpr.eqns[: span[0]], jaxpr.invars[num_leaves:])
    before = _before_first([every[0][n] for n in positions], [v for v in outside if v in samples])
    # A connection stores its own results and those of the block before it.
    arrival = {v: b + 2 for v, b in of_blocks.items() if v in last}
    arrival |= {v: b + 1 for v, b in of_connections.items() if v in last}
    arrival |= {v: 1 for v in before if v is not None}
    kept = tuple(
        tuple(v for v, first in arrival.items() if first <= connection <= last[v])
        for connection in range(len(connections) + 1)
    )
    results = tuple(tuple(results[n] for n in positions) for results in every)
    origins = {v: n for row in (before, *results) for n, v in enumerate(row) if v is not None}
    slot_of = _assign_slots(kept, origins)
    avals = {slot: aval_of(v) for v, slot in slot_of.items()}
    return ConnectionValues(
        constants=tuple(v for v in outside if v not in arrival),
        before=before,
        results=results,
        slots=tuple(avals[slot] for slot in range(len(avals))),
        slot_of=slot_of,
        kept=kept,
    )


def _before_first(results: Sequence[Var], outside: Sequence[Var]) -> tuple[Var | None, ...]:
    """Return, for each result, a value of its shape and dtype that is computed before the blocks.

    It enters the first connection in the place of a result, so that it is computed only once.
    """
    left = list(outside)
    before: list[Var | None] = []
    for result in results:
        kind = _kind(result)
        found = next((v for v in left if _kind(v) == kind), None)
        before.append(found)
        if found is not None:
            left.remove(found)
    return tuple(before)


def _kind(variable: Var) -> tuple[Any, Any]:
    return aval_of(variable).shape, aval_of(variable).dtype


def _last_reads(
    after: Sequence[Equation],
    outputs: Sequence[Atom],
    connections: Sequence[Sequence[Equation]],
    received: Sequence[Sequence[Atom]],
    of_connections: Mapping[Var, int],
) -> dict[Var, int]:
    """Return, by variable that connections read or pass to blocks, the last one that does so.

    For one that is also read after the blocks, it is the number of connections.
    """
    last: dict[Var, int] = {}
    for number, connection in enumerate(connections):
        passed = [atoms[number] for atoms in received]
        read = [*variables(passed), *inputs_of(connection)]
        last.update(dict.fromkeys(read, number))
    read_after = {*variables_read(after), *variables(outputs)}
    last.update((v, len(connections)) for v in read_after if v in last or v in of_connections)
    return last


def _assign_slots(kept: Sequence[Sequence[Var]], origins: Mapping[Var, int]) -> dict[Var, int]:
    """Assign slots; only counterparts, results of blocks at the same position, share one."""
    slot_of: dict[Var, int] = {}
    owners: list[int | None] = []
    for variables_kept in kept:
        used = {slot_of[v] for v in variables_kept if v in slot_of}
        for variable in variables_kept:
            if variable in slot_of:
                continue
            origin = origins.get(variable)
            free = (
                slot
                for slot, owner in enumerate(owners)
                if origin is not None and owner == origin and slot not in used
            )
            slot = next(free, len(owners))
            if slot == len(owners):
                owners.append(origin)
            used.add(slot)
            slot_of[variable] = slot
    return slot_of
