"""Rewriting equal blocks that are connected in different ways, as by skip connections.

The connection of two blocks is what the model computes between them. The rewritten program runs the
same switch before every block: branch b is the connection before block b. Values that are read
later than by the next block are passed along with the activation, in slots.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.blocks.block_lists import BlockList, find_block_lists
from meshwright.program.blocks.connection_values import ConnectionValues, connection_values
from meshwright.program.blocks.differences import first_difference, is_like, results_of
from meshwright.program.blocks.prove_equal import (
    Column,
    Placeholder,
    RolledBlockList,
    outer_columns,
    roll_block_list,
)
from meshwright.program.evaluate.dependencies import (
    dependent_variables,
    inputs_of,
    needed_equations,
    variables_read,
)
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    WITHOUT_RESULT,
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
    structs_of,
)
from meshwright.program.jaxpr.names import MODULE_MARK
from meshwright.program.trace.layout import Layout
from meshwright.program.trace.traced_loss import TracedLoss

_LARGEST_SHARE = 1 / 3
"""The largest share of a list's weights that connections may read: every stage holds these."""


def with_even_connections(
    traced: TracedLoss, same_leaves: Callable[[frozenset[str], str, str], bool]
) -> tuple[TracedLoss, frozenset[str]]:
    """Return a program in which the blocks of its longest list are connected equally, if possible.

    With it come the paths of the leaves in that list that only connections read. ``same_leaves``
    says whether two modules have the same leaves, some paths aside.
    """
    jaxpr = traced.closed.jaxpr
    lists, none = find_block_lists(jaxpr.eqns), frozenset[str]()
    if not lists:
        return traced, none
    blocks = max(lists, key=lambda blocks: blocks.num_blocks)
    rolled = roll_block_list(jaxpr, blocks, lambda a, b: same_leaves(none, a, b))
    if isinstance(rolled, RolledBlockList) and rolled.blocks.elements == blocks.elements:
        return traced, none
    connected = _connected_blocks(jaxpr, blocks)
    if connected is None:
        return traced, none
    apart = _leaves_of_connections(traced, connected)
    paths = [blocks.block_path(n) for n in range(blocks.num_blocks)]
    alike = all(same_leaves(apart, paths[0], path) for path in paths)
    in_all = any(_in_all(traced.layout, paths, leaf) for leaf in apart)
    if not alike or in_all or _share(traced.layout, blocks, apart) > _LARGEST_SHARE:
        return traced, none
    return _Writer(traced, connected).program(), apart


@dataclass(frozen=True)
class ConnectedBlocks:
    """Equal blocks and the connections before them.

    Attributes:
        connections: the equations before each block and after the previous one; none for the first.
        start: first equation of the first block.
        stop: first equation after the last block.
    """

    blocks: BlockList
    bodies: list[Sequence[Equation]]
    connections: list[Sequence[Equation]]
    start: int
    stop: int


def _connected_blocks(jaxpr: Jaxpr, blocks: BlockList) -> ConnectedBlocks | None:
    """Separate blocks from connections; what blocks have in common is at their ends."""
    stops = [stop for _, stop in blocks.ranges]
    modules: list[Sequence[Equation]] = [jaxpr.eqns[start:stop] for start, stop in blocks.ranges]
    length = _common_length(modules)
    if 2 * length < max(map(len, modules)):
        return None
    starts = [stop - length for stop in stops]
    befores = [starts[0], *stops[:-1]]
    connections: list[Sequence[Equation]] = [
        jaxpr.eqns[before:start] for before, start in zip(befores, starts, strict=True)
    ]
    if any(
        eqn.primitive.name in WITHOUT_RESULT for connection in connections for eqn in connection
    ):
        return None
    bodies = [module[-length:] for module in modules]
    return ConnectedBlocks(blocks, bodies, connections, starts[0], stops[-1])


def _common_length(modules: Sequence[Sequence[Equation]]) -> int:
    """Return how many equations at their ends all blocks have in common."""
    first, shortest = modules[0], min(map(len, modules))
    length = shortest
    for other in modules[1:]:
        ends = zip(reversed(first), reversed(other), strict=False)
        equal = (n for n, pair in enumerate(ends) if not is_like(*pair))
        length = min(length, next(equal, shortest))
    while length and any(first_difference(first[-length:], m[-length:]) for m in modules):
        length -= 1
    return length


def _leaves_of_connections(traced: TracedLoss, connected: ConnectedBlocks) -> frozenset[str]:
    """Return the paths of the leaves that only connections read, not blocks."""
    jaxpr = traced.closed.jaxpr
    pairs = zip(jaxpr.invars, traced.layout.step_leaves, strict=False)
    leaves = {variable: step.leaf.path for variable, step in pairs}
    for eqn in jaxpr.eqns:
        source = eqn.invars[0] if eqn.primitive.name == "convert_element_type" else None
        if isinstance(source, Var) and source in leaves:
            leaves[eqn.outvars[0]] = leaves[source]
    in_connections, in_blocks = (
        {leaves[v] for eqns in parts for v in variables_read(eqns) if v in leaves}
        for parts in (connected.connections, connected.bodies)
    )
    return frozenset(in_connections - in_blocks)


def _in_all(layout: Layout, paths: Sequence[str], leaf: str) -> bool:
    """Whether a leaf is in a block, and all blocks have one of that name: it belongs to blocks."""
    names = [leaf.removeprefix(f"{path}.") for path in paths if leaf.startswith(f"{path}.")]
    known = {other.path for other in layout.leaves}
    return bool(names) and all(f"{path}.{names[0]}" in known for path in paths)


def _share(layout: Layout, blocks: BlockList, paths: frozenset[str]) -> float:
    """Return the share of a list's weights that some leaves are."""
    heads = tuple(f"{element}." for element in blocks.elements)
    weights = [leaf for leaf in layout.leaves if leaf.is_weight and leaf.path.startswith(heads)]
    total = sum(leaf.size for leaf in weights)
    return sum(leaf.size for leaf in weights if leaf.path in paths) / max(total, 1)


class _Writer:
    """Re-traces a program with its connections as branches of one switch."""

    def __init__(self, traced: TracedLoss, connected: ConnectedBlocks) -> None:
        self.traced, self.connected = traced, connected
        self.jaxpr = traced.closed.jaxpr
        moving = set(results_of(self.jaxpr.eqns[connected.start : connected.stop]))
        columns = outer_columns(connected.bodies)
        # Positions that read the same value in every block share a name.
        keys = {place: tuple(map(id, atoms)) for place, atoms in columns.items()}
        received: dict[tuple[int, ...], Column] = {}
        for place, atoms in columns.items():
            if any(isinstance(atom, Var) and atom in moving for atom in atoms):
                received.setdefault(keys[place], atoms)
        self.received = list(received.values())
        self.names = {key: Placeholder(aval_of(atoms[0])) for key, atoms in received.items()}
        self.name_at = {place: self.names[key] for place, key in keys.items() if key in received}
        self.connections = [self._first_connection(), *connected.connections[1:]]
        self.values: ConnectionValues = connection_values(
            self.jaxpr,
            len(traced.layout.step_leaves),
            (connected.start, connected.stop),
            connected.bodies,
            self.connections,
            self.received,
        )
        self.branches = [self._branch(number) for number in range(len(connected.bodies))]

    def _first_connection(self) -> list[Equation]:
        """Return how the first block's inputs are computed from values that later connections read.

        Otherwise both would have to be passed along, or be computed by every stage.
        """
        before = self.jaxpr.eqns[: self.connected.start]
        computed = set(results_of(before))
        connections = [eqn for connection in self.connected.connections[1:] for eqn in connection]
        read = {v for v in inputs_of(connections) if v in computed}
        dependent = dependent_variables(before, read) - read
        eqns = [eqn for eqn in before if not dependent.isdisjoint(eqn.outvars)]
        return needed_equations(eqns, [atoms[0] for atoms in self.received])

    def program(self) -> TracedLoss:
        """Return the re-traced program."""
        closed = jax.make_jaxpr(self._run)(*structs_of(self.jaxpr.invars))
        return replace(self.traced, closed=closed)

    def _run(self, *inputs: Any) -> list[Any]:
        evaluator, connected, values = Evaluator(), self.connected, self.values
        env: Any = evaluator.environment(self.traced.closed, inputs).values
        evaluator.extend(env, self.jaxpr.eqns[: connected.start])
        slots = [jnp.zeros(aval.shape, aval.dtype) for aval in values.slots]
        latest = [
            jnp.zeros(aval_of(result).shape, aval_of(result).dtype) if v is None else env[v]
            for v, result in zip(values.before, values.results[0], strict=True)
        ]
        constants = [env[v] for v in values.constants]
        for number in range(len(connected.bodies)):
            with jax.named_scope(MODULE_MARK + connected.blocks.block_path(number)):
                received, slots = jax.lax.switch(
                    np.int32(number), self.branches, latest, slots, constants
                )
            env.update(zip(self.names.values(), received, strict=True))
            evaluator.extend(env, self._body(number))
            latest = [env[v] for v in values.results[number]]
        env.update((v, slots[values.slot_of[v]]) for v in values.kept[-1])
        evaluator.extend(env, self.jaxpr.eqns[connected.stop :])
        return [read_atom(atom, env) for atom in self.jaxpr.outvars]

    def _body(self, number: int) -> list[Equation]:
        """Return the equations of a block, which read what its connection passes to it by name."""
        eqns: list[Equation] = []
        for n, eqn in enumerate(self.connected.bodies[number]):
            places = enumerate(eqn.invars)
            operands: list[Any] = [self.name_at.get((n, place), atom) for place, atom in places]
            eqns.append(eqn.replace(invars=operands))
        return eqns

    def _branch(self, number: int) -> Callable[..., tuple[list[Any], list[Any]]]:
        """Return a connection as a function of the last block's results, slots and constants."""
        values = self.values

        def connection(
            latest: list[Any], slots: list[Any], constants: list[Any]
        ) -> tuple[list[Any], list[Any]]:
            env: dict[Any, Any] = dict(zip(values.constants, constants, strict=True))
            env.update((v, slots[values.slot_of[v]]) for v in values.kept[number])
            before = values.results[number - 1] if number else values.before
            env.update(zip(before, latest, strict=True))
            Evaluator().extend(env, self.connections[number])
            after = list(slots)
            for variable in values.kept[number + 1]:
                after[values.slot_of[variable]] = env[variable]
            return [read_atom(atoms[number], env) for atoms in self.received], after

        return connection


def read_atom(atom: Atom, env: Mapping[Any, Any]) -> Any:
    """Return the value of an atom, given the values of variables."""
    return jnp.asarray(atom.val, aval_of(atom).dtype) if isinstance(atom, Literal) else env[atom]
