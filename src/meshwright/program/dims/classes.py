"""Dim classes of a traced program: which dims belong together, and what sharding them costs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from meshwright.program.dims.factors import DimFactor, class_ids
from meshwright.program.dims.op import EventKind, KernelUse, Log, ShardingEvent, nbytes_of, shape_of
from meshwright.program.dims.walk import ProgramDims, Walk, all_programs
from meshwright.program.jaxpr.equations import Atom, ClosedJaxpr, Equation

LeafRole = Literal["param", "frozen", "state", "batch"]
"""A trained parameter, a frozen one, other state, or a part of the batch."""

WEIGHTS: tuple[LeafRole, ...] = ("param", "frozen")


class LeafLabel(NamedTuple):
    """What an input of the program is: its role and its canonical path."""

    role: LeafRole
    path: str


@dataclass(frozen=True, slots=True)
class LeafDims:
    """An input of the program and its dims.

    Attributes:
        role: trained or frozen parameter, other state, or batch.
        path: canonical path, such as ``blocks.0.mlp.up.kernel``.
        dims: for each dim its factors, major first; a dim of size 1 has none.
        uses: how dots, convolutions and lookups over data use its classes; empty for leaves that
            no such operation reads (biases, scales, position tables that are added).
    """

    role: LeafRole
    path: str
    shape: tuple[int, ...]
    nbytes: int
    dims: tuple[tuple[DimFactor, ...], ...]
    uses: Mapping[KernelUse, frozenset[int]]

    @property
    def is_kernel(self) -> bool:
        """Whether data is multiplied by it or looked up in it."""
        return bool(self.uses)

    def dims_used_as(self, *uses: KernelUse) -> tuple[int, ...]:
        """Return the positions of the dims that are used in one of these ways."""
        classes = frozenset[int]().union(*(self.uses.get(use, frozenset()) for use in uses))
        return tuple(
            d for d, dim in enumerate(self.dims) if any(factor.id in classes for factor in dim)
        )


class Roles(NamedTuple):
    """Which dims of a kernel are its columns and its rows, major first.

    Columns reach the output of its matrix product or lookup; rows are contracted or looked up.
    """

    column: tuple[int, ...]
    row: tuple[int, ...]


@dataclass(frozen=True)
class DimClasses:
    """The dim classes of one traced program.

    Attributes:
        root: the dims of every variable, nested calls included.
        leaves: the program's inputs in order.
        batch: classes of the first dim of the batch.
        heads: classes of kernels that are batch dims in products of data with data, as attention
            heads are.
        inside_heads: classes that those products contract: the dim of a head, the sequence.
        channels: classes of convolution channels.
        events: what would cost communication, in program order.
        mixed: classes that a product of data with data keeps, another sums over, and no kernel has.
    """

    root: ProgramDims
    leaves: tuple[LeafDims, ...]
    batch: frozenset[int]
    heads: frozenset[int]
    inside_heads: frozenset[int]
    channels: frozenset[int]
    events: tuple[ShardingEvent, ...]
    mixed: frozenset[int] = frozenset()

    @cached_property
    def sequence(self) -> frozenset[int]:
        """Classes of the positions of a row: the dims that attention sums over.

        Of positions in chunks, it is the class that counts chunks.
        """
        others = self.batch | _ids(d for leaf in self.leaves if leaf.is_kernel for d in leaf.dims)
        major, minor = set[int](), set[int]()
        for program in all_programs(self.root):
            for variable, value in program.values.items():
                for dim in program.dims(variable) if value.has_data else ():
                    ids = [factor.id for factor in dim]
                    if self.mixed.intersection(ids) and ids[0] not in others:
                        major.add(ids[0])
                        minor.update(ids[1:])
        return frozenset(major - minor)

    def positions(self, program: ProgramDims, atom: Atom) -> list[int]:
        """Return the dims of a value of a program that are the positions of rows."""
        dims = enumerate(program.dims(atom))
        return [n for n, dim in dims if dim and dim[0].id in self.sequence]

    @cached_property
    def weights(self) -> tuple[LeafDims, ...]:
        """The parameters, trained or frozen."""
        return tuple(leaf for leaf in self.leaves if leaf.role in WEIGHTS)

    @cached_property
    def vocabularies(self) -> frozenset[int]:
        """Classes that data is looked up in."""
        empty = frozenset[int]()
        return empty.union(*(leaf.uses.get("lookup", empty) for leaf in self.leaves))

    @cached_property
    def _leaf_by_path(self) -> Mapping[str, LeafDims]:
        return {leaf.path: leaf for leaf in self.leaves}

    @cached_property
    def _events_by_class(self) -> Mapping[int, list[int]]:
        numbers = defaultdict[int, list[int]](list)
        for number, event in enumerate(self.events):
            for class_id in event.classes:
                numbers[class_id].append(number)
        return numbers

    @cached_property
    def _leaves_by_class(self) -> Mapping[int, list[int]]:
        positions = defaultdict[int, list[int]](list)
        for position, leaf in enumerate(self.leaves):
            for class_id in _ids(leaf.dims):
                positions[class_id].append(position)
        return positions

    def leaves_with(self, classes: Iterable[int]) -> list[int]:
        """Return the positions of the inputs that have a dim of any of these classes."""
        return sorted({i for c in classes for i in self._leaves_by_class.get(c, ())})

    def leaf(self, path: str) -> LeafDims:
        """Return the input with this canonical path."""
        return self._leaf_by_path[path]

    def roles_of(self, path: str) -> Roles:
        """Return which dims of a kernel are its columns and its rows."""
        leaf = self.leaf(path)
        column, row = leaf.dims_used_as("column"), leaf.dims_used_as("row")
        if column or row:
            return Roles(column, row)
        return Roles(leaf.dims_used_as("entry"), leaf.dims_used_as("lookup"))

    def events_of(self, classes: Iterable[int]) -> list[ShardingEvent]:
        """Return the events of any of these classes, in program order."""
        numbers = {number for c in classes for number in self._events_by_class.get(c, ())}
        return [self.events[number] for number in sorted(numbers)]

    def equations(self) -> Iterator[tuple[ProgramDims, Equation]]:
        """Yield all equations, each with the program it is in."""
        for program in all_programs(self.root):
            yield from ((program, eqn) for eqn in program.jaxpr.eqns)

    def events_at(self, program: ProgramDims, number: int) -> list[ShardingEvent]:
        """Return the events of an equation, given by its number in a program."""
        return [self.events[n] for n in program.noted.get(number, ())]

    def combines_samples(self, program: ProgramDims, number: int) -> bool:
        """Whether an equation, given by its number in a program, combines several samples."""
        events = self.events_at(program, number)
        return any(e.kind != "spread" and e.classes & self.batch for e in events)

    def sample_dims(self, program: ProgramDims, atom: Atom) -> list[int]:
        """Return the dims of a value of a program that have samples in them."""
        dims = enumerate(program.dims(atom))
        return [n for n, dim in dims if any(factor.id in self.batch for factor in dim)]

    def traffic(self, classes: Iterable[int]) -> int:
        """Return the bytes each device sends per training step if these classes are sharded.

        A large axis is assumed: a reduction sends its array twice (scatter, then gather), a gather
        once.
        """
        by_source = dict[tuple[EventKind, int], int]()
        for number, event in enumerate(self.events_of(classes)):
            key = (event.kind, event.source if event.source >= 0 else -1 - number)
            trips = 1 if event.blocking else 2
            by_source[key] = max(by_source.get(key, 0), trips * event.total)
        return sum(by_source.values())


def find_dim_classes(program: ClosedJaxpr, labels: Sequence[LeafLabel]) -> DimClasses:
    """Find the dim classes of a loss traced over flat leaves; the labels say what each input is."""
    walk = Walk()
    inputs = [
        walk.input(
            variable.aval,
            leaf=position if label.role in WEIGHTS else None,
            trained=label.role == "param",
            has_data=label.role == "batch",
        )
        for position, (variable, label) in enumerate(zip(program.jaxpr.invars, labels, strict=True))
    ]
    root, _ = walk.run(program.jaxpr, inputs)
    uses = _uses(walk.log)
    leaves = tuple(
        LeafDims(
            role=label.role,
            path=label.path,
            shape=shape_of(variable.aval),
            nbytes=nbytes_of(variable.aval),
            dims=root.dims(variable),
            uses=uses.get(position, {}),
        )
        for position, (variable, label) in enumerate(zip(program.jaxpr.invars, labels, strict=True))
    )
    batch = _ids(leaf.dims[0] for leaf in leaves if leaf.role == "batch" and leaf.dims)
    heads, inside_heads = _attention(walk.log, leaves)
    return DimClasses(
        root=root,
        leaves=leaves,
        batch=batch,
        heads=heads,
        inside_heads=inside_heads,
        channels=class_ids(walk.log.channels) - batch,
        events=tuple(walk.log.events),
        mixed=_mixed(walk.log, leaves) - batch,
    )


def _mixed(log: Log, leaves: Sequence[LeafDims]) -> frozenset[int]:
    """Return the classes that one product of data with data keeps and another sums over."""
    of_kernels = _ids(dim for leaf in leaves if leaf.is_kernel for dim in leaf.dims)
    summed = class_ids(d for product in log.products for d in product.contracted)
    return summed & class_ids(d for product in log.products for d in product.free) - of_kernels


def _uses(log: Log) -> Mapping[int, Mapping[KernelUse, frozenset[int]]]:
    uses = defaultdict[int, dict[KernelUse, frozenset[int]]](dict)
    for leaves, use, dim in log.uses:
        for leaf in leaves:
            uses[leaf][use] = uses[leaf].get(use, frozenset()) | class_ids([dim])
    return uses


def _attention(log: Log, leaves: Sequence[LeafDims]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the classes of heads and those contracted inside them.

    Heads are batch dims of products of data with data. If such a product contracts a dim of
    kernels, as that of queries and keys does, its other dims of kernels are heads too: the query
    heads that share a key head.
    """
    of_data = _ids(dim for leaf in leaves if leaf.role == "batch" for dim in leaf.dims)
    of_kernels = _ids(dim for leaf in leaves if leaf.is_kernel for dim in leaf.dims) - of_data
    heads, inside = set[int](), set[int]()
    for product in log.products:
        shared = class_ids(product.shared) & of_kernels
        if shared:
            contracted = class_ids(product.contracted)
            heads |= shared
            inside |= contracted
            if contracted & of_kernels:
                heads |= class_ids(product.free) & of_kernels
    return frozenset(heads), frozenset(inside - heads)


def _ids(dims: Iterable[Iterable[DimFactor]]) -> frozenset[int]:
    return frozenset(factor.id for dim in dims for factor in dim)
