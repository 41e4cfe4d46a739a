"""Candidates: the ways to shard a model's dim classes over the tensor axis, with their cost."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshwright.program.dims.classes import WEIGHTS, DimClasses, LeafDims
from meshwright.program.dims.factors import DimFactor

Dim = tuple[DimFactor, ...]

Pattern = tuple[tuple[int, ...], frozenset[tuple[str, int, tuple[int, ...]]]]
"""Number of parts of a candidate, and where it occurs: path, dim, and sizes of factors."""

ObstacleKind = Literal["", "size", "recurrent", "inside", "attention", "blocked"]
"""Why a candidate can never be used; empty if it can.

- ``size``: its size is not a multiple of the axis.
- ``recurrent``: it is two dims of one parameter, as in a recurrence or a residual branch.
- ``inside``: it is an inner factor of a parameter's dim, which no PartitionSpec can express.
- ``attention``: attention contracts it per head.
- ``blocked``: an operation needs it whole.
"""


def parts_along(dim: Dim, splits: Mapping[int, int]) -> int:
    """Return the number of contiguous parts of a dim whose classes are sharded like this."""
    parts = 1
    for factor in dim:
        factor_parts = splits.get(factor.id, 1)
        parts *= factor_parts
        if factor_parts != factor.size:
            break
    return parts


@dataclass(frozen=True, eq=False)
class Candidate:
    """Dim classes that the tensor axis could shard together.

    Attributes:
        splits: the number of parts of each class; their product is the size of the axis.
        touched: positions (in the program's inputs) of the parameters with such a dim.
        placed: by position of an input, the dim that would be sharded.
        cost: bytes that each device would send per step.
        obstacle: why it cannot be used; empty if it can.
        pattern: the same for the candidates of repeated blocks.
    """

    classes: DimClasses
    splits: Mapping[int, int]
    touched: tuple[int, ...]
    placed: Mapping[int, int]
    cost: int
    obstacle: ObstacleKind
    pattern: Pattern

    @cached_property
    def kernels(self) -> frozenset[int]:
        """Those of the touched parameters that take part in a product with data, or in a lookup."""
        return frozenset(i for i in self.touched if self.classes.leaves[i].is_kernel)

    @cached_property
    def factors(self) -> tuple[DimFactor, ...]:
        """Its classes in the order of the parameters' dims."""
        leaves = (self.classes.leaves[i] for i in self.touched)
        factors = (factor for leaf in leaves for dim in leaf.dims for factor in dim)
        return tuple(dict.fromkeys(factor for factor in factors if factor.id in self.splits))

    @cached_property
    def cover(self) -> int:
        """Bytes of the parameters it would shard, or could shard without the obstacle."""
        return self.bytes_of(self.touched if self.obstacle else self.placed)

    def bytes_of(self, leaves: Iterable[int]) -> int:
        """Bytes of the parameters at these positions of the program's inputs."""
        chosen = (self.classes.leaves[i] for i in leaves)
        return sum(leaf.nbytes for leaf in chosen if leaf.role in WEIGHTS)

    @cached_property
    def reductions(self) -> frozenset[int]:
        """Identities of the forward events that reduce or gather its classes."""
        return frozenset().union(*(reductions_of(self.classes, name) for name in self.splits))


def reductions_of(classes: DimClasses, name: int) -> frozenset[int]:
    """Return the identities of the forward events that reduce or gather a class."""
    return frozenset(id(event) for event in classes.events_of([name]) if event.kind != "spread")


def find_candidates(classes: DimClasses, size: int, *, square: bool = False) -> list[Candidate]:
    """Return every candidate that has a kernel, in the order of the program's inputs.

    If ``square``, a class may be two dims of one parameter, of which the last is sharded.
    """
    kernel_dims = [dim for leaf in classes.weights if leaf.is_kernel for dim in leaf.dims if dim]
    sizes = {factor.id: factor.size for dim in kernel_dims for factor in dim}
    single = [((name, size),) for name in sizes if name not in classes.batch]
    several = [tuple(splits.items()) for splits in _composites(classes, kernel_dims, size)]

    def candidate(splits: Mapping[int, int]) -> Candidate:
        leaves = [(i, classes.leaves[i]) for i in classes.leaves_with(splits)]
        touched = [i for i, leaf in leaves if leaf.role in WEIGHTS]
        placed = {
            i: dim
            for i, leaf in leaves
            if leaf.role != "batch" and (dim := _place(leaf, splits, size, square)) is not None
        }
        return Candidate(
            classes=classes,
            splits=splits,
            touched=tuple(touched),
            placed=placed,
            cost=classes.traffic(splits),
            obstacle=_obstacle(classes, splits, sizes, touched, square),
            pattern=_pattern(classes, splits, touched),
        )

    return [candidate(dict(splits)) for splits in dict.fromkeys([*single, *several])]


def reduced_together(classes: DimClasses, dim: Dim) -> Dim:
    """Return the leading factors of a dim that are only ever reduced together with the first.

    Key heads and the query heads that share one are such a pair: sharding the inner one needs no
    reduction that sharding the outer one does not need as well. The dim inside a head is not:
    heads stay whole.
    """
    if len(dim) == 1:
        return dim
    outer = reductions_of(classes, dim[0].id)
    of_heads = dim[0].id in classes.heads
    count = 1
    for factor in dim[1:]:
        same_kind = (factor.id in classes.heads) == of_heads
        if not same_kind or not reductions_of(classes, factor.id) <= outer:
            break
        count += 1
    return dim[:count]


def _composites(classes: DimClasses, dims: Iterable[Dim], size: int) -> Iterator[Mapping[int, int]]:
    """Yield divisions over several factors of a dim whose first factor alone is too small."""
    for dim in dims:
        rest, splits = size, dict[int, int]()
        for factor in reduced_together(classes, dim):
            splits[factor.id] = math.gcd(rest, factor.size)
            rest //= splits[factor.id]
            if rest == 1 or splits[factor.id] != factor.size:
                break
        if rest == 1 and len(splits) > 1 and not classes.batch & splits.keys():
            yield splits


def _place(leaf: LeafDims, splits: Mapping[int, int], size: int, square: bool) -> int | None:
    dims = dims_with(leaf, splits)
    fits = (len(dims) == 1 or square) and parts_along(leaf.dims[dims[-1]], splits) == size
    return dims[-1] if fits else None


def dims_with(leaf: LeafDims, splits: Mapping[int, int]) -> list[int]:
    """Return the dims of a leaf that have one of these classes."""
    return [d for d, dim in enumerate(leaf.dims) if any(factor.id in splits for factor in dim)]


def _obstacle(
    classes: DimClasses,
    splits: Mapping[int, int],
    sizes: Mapping[int, int],
    touched: Sequence[int],
    square: bool,
) -> ObstacleKind:
    leaves = [classes.leaves[i] for i in touched]
    if not square and any(len(dims_with(leaf, splits)) > 1 for leaf in leaves):
        return "recurrent"
    if classes.inside_heads & splits.keys():
        return "attention"
    if any(event.kind == "block" for event in classes.events_of(splits)):
        return "blocked"
    if any(sizes[name] % parts for name, parts in splits.items()):
        return "size"
    if any(_is_inside(dim, splits) for leaf in leaves for dim in leaf.dims):
        return "inside"
    return ""


def _is_inside(dim: Dim, splits: Mapping[int, int]) -> bool:
    """Whether an unsharded factor precedes a sharded one."""
    divided = [factor.id in splits for factor in dim]
    return divided != sorted(divided, reverse=True)


def _pattern(classes: DimClasses, splits: Mapping[int, int], touched: Sequence[int]) -> Pattern:
    """Return where the candidate occurs, with ``*`` for block numbers."""
    places = {
        (re.sub(r"[0-9]+", "*", leaf.path), d, tuple(factor.size for factor in leaf.dims[d]))
        for leaf in (classes.leaves[i] for i in touched)
        for d in dims_with(leaf, splits)
    }
    return tuple(sorted(splits.values())), frozenset(places)
