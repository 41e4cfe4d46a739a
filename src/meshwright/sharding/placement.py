"""The placement of a leaf on the mesh, and dividing leaves over fsdp and pipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.program.trace.model_leaves import Leaf
from meshwright.sharding.reasons import Divided, NoDivisibleDim, Reason, TooSmall, render

DimAxes = tuple[str, ...]
"""The mesh axes one dim is divided over; empty for a dim that is not divided."""


@dataclass(frozen=True)
class Placement:
    """Which mesh axes divide the dims of one leaf.

    Attributes:
        path: canonical path.
        dims: for each dim, the axes it is divided over.
        reasons: the reasons; none if no axis divides the leaf.
    """

    path: str
    dims: tuple[DimAxes, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def reason(self) -> str:
        """The reasons as one line of text."""
        return render(self.reasons)

    @property
    def spec(self) -> PartitionSpec:
        """The placement as a PartitionSpec."""
        return to_spec(self.dims)

    def axes(self) -> set[str]:
        """Return the axes that divide the leaf."""
        return {axis for dim in self.dims for axis in dim}

    def without(self, *axes: str) -> PartitionSpec:
        """Return the spec of the leaf gathered over these axes."""
        return to_spec(tuple(tuple(a for a in dim if a not in axes) for dim in self.dims))

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Return the number of distinct shards."""
        count = 1
        for axis in self.axes():
            count *= sizes.get(axis, 1)
        return count


def to_spec(dims: Iterable[DimAxes]) -> PartitionSpec:
    """Return the axes of each dim as a PartitionSpec, without trailing undivided dims."""
    entries: list[Any] = [
        None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def bytes_per_device(leaf: Leaf, placement: Placement, sizes: Mapping[str, int]) -> int:
    """Return the size of a leaf's shard in bytes."""
    return leaf.nbytes // placement.shards(sizes)


def add_fsdp(
    leaf: Leaf, tensor_dims: Sequence[DimAxes], *, size: int, smallest: int, keep: int = 0
) -> Placement:
    """Divide a leaf over the fsdp axis, on its largest divisible dim that is not yet divided.

    Args:
        leaf: the leaf.
        tensor_dims: for each dim, the axes that already divide it.
        size: devices on the fsdp axis.
        smallest: leaves with fewer elements are not divided: gathering them costs more than it
            saves.
        keep: number of leading dims that are never divided.
    """
    dims = list(tensor_dims)
    elements = math.prod(leaf.shape[keep:])
    if elements < smallest:
        return Placement(leaf.path, tuple(dims), (TooSmall("fsdp", elements),))
    free = [d for d in range(keep, len(dims)) if not dims[d] and leaf.shape[d] % size == 0]
    if not free:
        return Placement(leaf.path, tuple(dims), (NoDivisibleDim("fsdp", leaf.shape, size),))
    # Of dims of equal size take the last: rows of a kernel are contracted, columns are not.
    best = max(free, key=lambda d: (leaf.shape[d], d))
    dims[best] = ("fsdp",)
    return Placement(leaf.path, tuple(dims), (Divided("fsdp", best, leaf.shape[best], size),))


def add_pipe(
    leaf: Leaf, placed: Placement, *, sizes: Mapping[str, int], smallest: int
) -> Placement:
    """Divide a leaf that every stage uses over the pipe axis, on its largest divisible dim.

    Stages gather it once per update; between updates, and in the optimizer, each holds a shard.
    """
    pieces = [math.prod(sizes.get(axis, 1) for axis in (*axes, "pipe")) for axes in placed.dims]
    divisible = [d for d, count in enumerate(pieces) if leaf.shape[d] % count == 0]
    if not divisible or leaf.size < smallest:
        return placed
    # Prefer a dim that no other axis divides: it is gathered in one piece.
    best = max(divisible, key=lambda d: (not placed.dims[d], leaf.shape[d], d))
    dims = list(placed.dims)
    dims[best] = (*dims[best], "pipe")
    reason = Divided("pipe", best, leaf.shape[best], pieces[best])
    return Placement(leaf.path, tuple(dims), (*placed.reasons, reason))
