"""Where each leaf lives on the mesh, and why."""

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
    """Where one leaf lives.

    Attributes:
        path: canonical path.
        dims: for each dim, the axes it is divided over.
        reasons: why; none for a leaf that nothing divides.
    """

    path: str
    dims: tuple[DimAxes, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def reason(self) -> str:
        """Why it lives there, for people."""
        return render(self.reasons)

    @property
    def spec(self) -> PartitionSpec:
        """The placement as JAX writes it."""
        return to_spec(self.dims)

    def axes(self) -> set[str]:
        """Return the axes the leaf is divided over."""
        return {axis for dim in self.dims for axis in dim}

    def without(self, *axes: str) -> PartitionSpec:
        """Return the spec with these axes gathered."""
        return to_spec(tuple(tuple(a for a in dim if a not in axes) for dim in self.dims))

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Return into how many different pieces the leaf is divided."""
        count = 1
        for axis in self.axes():
            count *= sizes.get(axis, 1)
        return count


def to_spec(dims: Iterable[DimAxes]) -> PartitionSpec:
    """Write dims' axes as a PartitionSpec without trailing empty dims."""
    entries: list[Any] = [
        None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def bytes_per_device(leaf: Leaf, placement: Placement, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a leaf's shard."""
    return leaf.nbytes // placement.shards(sizes)


def add_fsdp(
    leaf: Leaf, tensor_dims: Sequence[DimAxes], *, size: int, smallest: int, keep: int = 0
) -> Placement:
    """Divide the largest divisible dim of a leaf over the fsdp axis, besides its tensor dims.

    Args:
        leaf: the leaf.
        tensor_dims: for each dim, the axes it is already divided over.
        size: devices on the fsdp axis.
        smallest: leaves with fewer elements are not divided, since gathering them costs more
            than it saves.
        keep: leading dims that are never divided.
    """
    dims = list(tensor_dims)
    elements = math.prod(leaf.shape[keep:])
    if elements < smallest:
        return Placement(leaf.path, tuple(dims), (TooSmall("fsdp", elements),))
    free = [d for d in range(keep, len(dims)) if not dims[d] and leaf.shape[d] % size == 0]
    if not free:
        return Placement(leaf.path, tuple(dims), (NoDivisibleDim("fsdp", leaf.shape, size),))
    # Of equal dims the last is taken: rows of a kernel are contracted, columns are not.
    best = max(free, key=lambda d: (leaf.shape[d], d))
    dims[best] = ("fsdp",)
    return Placement(leaf.path, tuple(dims), (Divided("fsdp", best, leaf.shape[best], size),))


def add_pipe(
    leaf: Leaf, placed: Placement, *, sizes: Mapping[str, int], smallest: int
) -> Placement:
    """Divide a leaf that every stage uses over the pipe axis, on its largest dim.

    Stages gather it once per update; between updates and in the optimizer each holds its shard.
    """
    pieces = [math.prod(sizes.get(axis, 1) for axis in (*axes, "pipe")) for axes in placed.dims]
    fits = [d for d, count in enumerate(pieces) if leaf.shape[d] % count == 0]
    if not fits or leaf.size < smallest:
        return placed
    # A dim that only pipe divides is gathered in one piece; one shared with fsdp is second best.
    best = max(fits, key=lambda d: (not placed.dims[d], leaf.shape[d], d))
    dims = list(placed.dims)
    dims[best] = (*dims[best], "pipe")
    reason = Divided("pipe", best, leaf.shape[best], pieces[best])
    return Placement(leaf.path, tuple(dims), (*placed.reasons, reason))
