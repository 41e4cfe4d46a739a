"""What a propagation rule works with: an equation, what is known about its operands, a log."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshwright.program.dims.factors import Dim, Dims, Factors, class_ids
from meshwright.program.jaxpr.equations import Equation, aval_of

Shape = tuple[int, ...]

EventKind = Literal["contract", "reduce", "spread", "gather", "block"]
"""What happens to a class at an operation, and what sharding the class would cost there.

- ``contract``: a dot or convolution sums over it: the result is reduced over the devices.
- ``reduce``: a sum, maximum or lookup runs over it: the result is reduced over the devices.
- ``spread``: an operand without the class is used for every index of it: the operand's gradient
  is reduced over the devices in the backward pass.
- ``gather``: the operation needs or creates the whole dim: the operand is gathered first, or the
  result's gradient in the backward pass.
- ``block``: the class must stay whole: its indices mean different things (the query, key and value
  of a fused kernel), the operation loops over them, or it is unknown.
"""

KernelUse = Literal["row", "column", "batched", "lookup", "entry"]
"""How an operation uses a dim of a parameter: a dot contracts it (row), passes it to the result
(column) or has it as a batch dim (batched); a lookup picks an index of it (lookup), or returns all
of it (entry)."""


class Value(NamedTuple):
    """What is known about one array of the program.

    Attributes:
        params: leaves it is computed from, if it depends on no data.
        has_data: whether it depends on the batch.
        has_grad: whether a gradient flows through it to a parameter.
        source: equal for values that are the same numbers, cast or rearranged.
    """

    dims: Dims
    params: frozenset[int]
    has_data: bool
    has_grad: bool
    source: int


@dataclass(frozen=True)
class ShardingEvent:
    """Something an operation does with a class that costs communication if it is sharded.

    Attributes:
        kind: what happens, see `EventKind`.
        dims: the dims concerned.
        nbytes: bytes of the array that would be reduced or gathered, each time.
        times: how often the surrounding loops run the operation (unknown counts are 1).
        path: its module; empty if unknown.
        source: the array that is spread or gathered; partial results for one array are merged
            before they are sent, so events with the same source cost once. -1 if it has none.
        kept_dims: the dims of the array that is reduced.
        weight: for a product of the batch itself, which is whole on every device, the bytes of
            the weight: gathering it is the alternative. 0 for other events.
    """

    kind: EventKind
    dims: Dims
    nbytes: int
    times: int
    primitive: str
    path: str
    source: int
    kept_dims: Dims
    weight: int

    @cached_property
    def classes(self) -> frozenset[int]:
        """The classes concerned, once all dims of the program are known."""
        return class_ids(self.dims)

    @cached_property
    def kept(self) -> frozenset[int]:
        """The classes of the array that is reduced.

        If one of them is sharded as well, each device needs only its own part.
        """
        return class_ids(self.kept_dims)

    @property
    def total(self) -> int:
        """Bytes over all runs of the operation."""
        return self.nbytes * self.times

    @property
    def blocking(self) -> bool:
        """Whether the operation needs the class whole."""
        return self.kind in ("gather", "block")


class LoggedUse(NamedTuple):
    """A dim of some parameters used by a dot, convolution or lookup."""

    leaves: frozenset[int]
    use: KernelUse
    dim: Dim


class Product(NamedTuple):
    """The dims of a product of data with data: batch dims, contracted dims, and the others."""

    shared: Dims
    contracted: Dims
    free: Dims


@dataclass(slots=True)
class Log:
    """What the rules record.

    Attributes:
        events: what would cost communication.
        uses: how parameters are used.
        products: the products of data with data.
        channels: the dims of convolution channels.
    """

    events: list[ShardingEvent] = field(default_factory=list[ShardingEvent])
    uses: list[LoggedUse] = field(default_factory=list[LoggedUse])
    products: list[Product] = field(default_factory=list[Product])
    channels: list[Dim] = field(default_factory=list[Dim])


@dataclass(slots=True)
class Op:
    """One equation in one call of a program.

    Attributes:
        operands: what is known about the inputs.
        path: the module it belongs to; empty if unknown.
        times: how often the surrounding loops run it.
    """

    equation: Equation
    operands: Sequence[Value]
    path: str
    times: int
    factors: Factors
    log: Log

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.equation.primitive.name

    @property
    def params(self) -> Mapping[str, Any]:
        """The primitive's parameters."""
        return self.equation.params

    @property
    def avals(self) -> list[Any]:
        """The shapes and dtypes of the operands."""
        return [atom.aval for atom in self.equation.invars]

    @property
    def out_avals(self) -> list[Any]:
        """The shapes and dtypes of the results."""
        return [variable.aval for variable in self.equation.outvars]

    def dims(self, operand: int = 0) -> Dims:
        """Return the dims of an operand."""
        return self.operands[operand].dims

    def shape(self, operand: int = 0) -> Shape:
        """Return the shape of an operand."""
        return shape_of(self.equation.invars[operand].aval)

    def out_shape(self, result: int = 0) -> Shape:
        """Return the shape of a result."""
        return shape_of(self.equation.outvars[result].aval)

    def nbytes(self, operand: int = 0) -> int:
        """Return the bytes of an operand."""
        return nbytes_of(self.equation.invars[operand].aval)

    def out_nbytes(self, result: int = 0) -> int:
        """Return the bytes of a result."""
        return nbytes_of(self.equation.outvars[result].aval)

    def fresh(self, result: int = 0) -> Dims:
        """Return new dims for a result, unrelated to the operands'."""
        return self.factors.dims(self.out_shape(result))

    def unify(self, left: Dim, right: Dim) -> Dim:
        """Merge two dims; return the factors of ``left`` that do not match."""
        return self.factors.unify(left, right)

    def unify_all(self, left: Dims, right: Dims) -> None:
        """Merge the dims of two arrays of one shape."""
        for a, b in zip(left, right, strict=True):
            self.factors.unify(a, b)

    def note(
        self,
        kind: EventKind,
        dims: Iterable[Dim],
        nbytes: int,
        source: int = -1,
        kept: Dims = (),
        weight: int = 0,
    ) -> None:
        """Log an event for the classes of these dims; see `ShardingEvent`."""
        larger = tuple(dim for dim in dims if dim)
        if larger:
            at = self.times, self.name, self.path
            self.log.events.append(ShardingEvent(kind, larger, nbytes, *at, source, kept, weight))

    def reduce(self, dims: Iterable[Dim], kept: Dims = ()) -> None:
        """Log that the results are sums, maxima or picks over these dims."""
        self.note("reduce", dims, sum(map(nbytes_of, self.out_avals)), kept=kept)

    def gather(self, dims: Iterable[Dim], operand: int = 0) -> None:
        """Log that the operation needs these dims of an operand whole."""
        self.note("gather", dims, self.nbytes(operand), self.operands[operand].source)

    def make(self, dims: Iterable[Dim]) -> None:
        """Log that these dims of the result are new, made of operands that must be whole."""
        if any(value.has_grad for value in self.operands):
            self.note("gather", dims, self.out_nbytes())

    def distinguish(self, dims: Iterable[Dim], operand: int = 0) -> None:
        """Log that the indices of these dims mean different things."""
        self.note("block", dims, self.nbytes(operand))

    def spread(self, operand: int, dims: Iterable[Dim]) -> None:
        """Log that an operand is used for every index of dims it does not have."""
        value = self.operands[operand]
        if value.has_grad:
            self.note("spread", dims, self.nbytes(operand), value.source, kept=value.dims)

    def use(self, operand: int, use: KernelUse, dims: Iterable[Dim]) -> None:
        """Log how the parameters behind an operand are used."""
        leaves = self.operands[operand].params
        if leaves:
            self.log.uses.extend(LoggedUse(leaves, use, dim) for dim in dims if dim)


Rule = Callable[[Op], list[Dims]]
"""Returns the dims of an operation's results, and logs what happens to the operands' dims."""


def shape_of(aval: Any) -> Shape:
    """Return the shape of an abstract value; tokens, for example, have none."""
    return tuple(getattr(aval, "shape", ()))


def nbytes_of(aval: Any) -> int:
    """Return the bytes of an abstract value."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(shape_of(aval)) * itemsize


def is_inexact(aval: Any) -> bool:
    """Whether gradients can flow through an abstract value."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.inexact)


def primitives(names: str) -> frozenset[str]:
    """Return the primitives in a space-separated list."""
    return frozenset(names.split())


def without(dims: Dims, *excluded: Iterable[int]) -> Dims:
    """Return the dims except those at the excluded positions."""
    return pick(dims, positions_without(len(dims), *excluded))


def positions_without(rank: int, *excluded: Iterable[int]) -> list[int]:
    """Return the positions of a shape except the excluded ones."""
    skip = {position for group in excluded for position in group}
    return [position for position in range(rank) if position not in skip]


def pick(dims: Dims, positions: Iterable[int]) -> Dims:
    """Return the dims at these positions, in their order."""
    return tuple(dims[position] for position in positions)


def unknown(op: Op) -> list[Dims]:
    """Assume nothing: the results are unrelated to the operands, which must stay whole."""
    for operand, value in enumerate(op.operands):
        op.note("block", value.dims, op.nbytes(operand))
    results = [op.fresh(result) for result in range(len(op.out_avals))]
    for result, dims in enumerate(results):
        op.note("block", dims, op.out_nbytes(result))
    return results


def free_dims(eqn: Equation, side: int) -> list[int]:
    """Return the dims of an operand of a product that are neither contracted nor batch dims."""
    contracting, batch = eqn.params["dimension_numbers"]
    used = {*contracting[side], *batch[side]}
    return [d for d in range(len(aval_of(eqn.invars[side]).shape)) if d not in used]


def result_dims(eqn: Equation) -> list[tuple[int | None, int | None]]:
    """Return for each dim of a product's result which dim of each operand it is; None for none."""
    left, right = free_dims(eqn, 0), free_dims(eqn, 1)
    batch = zip(*eqn.params["dimension_numbers"][1], strict=True)
    return [*batch, *((d, None) for d in left), *((None, d) for d in right)]
