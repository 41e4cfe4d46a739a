"""The placement of a leaf on the mesh, with its reasons, and sharding leaves over fsdp and pipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from meshwright.program.trace.model_leaves import Leaf
from meshwright.text.units import counted

DimAxes = tuple[str, ...]
"""The mesh axes one dim is sharded over; empty for a dim that is not sharded."""


@dataclass(frozen=True)
class Reason:
    """One reason for the placement of a leaf.

    Attributes:
        in_block: the same about one block of a stack, which lacks the stack's leading dim; None if
            nothing changes.
        of_stages: whether it says that pipeline stages hold different blocks.
    """

    text: str
    in_block: str | None = None
    of_stages: bool = False

    def __str__(self) -> str:
        return self.text

    def in_one_block(self) -> Reason:
        """Return the reason for one block of a stack."""
        return self if self.in_block is None else Reason(self.in_block)


BY_ANNOTATION = Reason("annotated in the model")


@dataclass(frozen=True)
class Placement:
    """Which mesh axes shard each dim of the leaf at a canonical path, and why.

    There are no reasons if no axis shards the leaf.
    """

    path: str
    dims: tuple[DimAxes, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def reason(self) -> str:
        """The reasons as one line of text."""
        return "; ".join(map(str, self.reasons)) or "the same on every device"

    @property
    def spec(self) -> PartitionSpec:
        """The placement as a PartitionSpec."""
        return to_spec(self.dims)

    def axes(self) -> set[str]:
        """Return the axes that shard the leaf."""
        return {axis for dim in self.dims for axis in dim}

    def gathered(self, *axes: str) -> Placement:
        """Return the placement of the leaf gathered over these axes."""
        dims = tuple(tuple(a for a in dim if a not in axes) for dim in self.dims)
        return Placement(self.path, dims, self.reasons)

    def without(self, *axes: str) -> PartitionSpec:
        """Return the spec of the leaf gathered over these axes."""
        return self.gathered(*axes).spec

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Return the number of distinct shards."""
        return math.prod(sizes.get(axis, 1) for axis in self.axes())


def to_spec(dims: Iterable[DimAxes]) -> PartitionSpec:
    """Return the axes of each dim as a PartitionSpec, without trailing unsharded dims."""
    entries = [axes or None for axes in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def bytes_per_device(leaf: Leaf, placement: Placement, sizes: Mapping[str, int]) -> int:
    """Return the size of a leaf's shard in bytes."""
    return leaf.nbytes // placement.shards(sizes)


def add_fsdp(
    leaf: Leaf, placed: Placement, *, size: int, smallest: int, keep: int = 0
) -> Placement:
    """Shard a leaf over the fsdp axis, on its largest divisible dim that is not yet sharded.

    Leaves with fewer elements than ``smallest`` are not sharded: gathering them costs more than it
    saves. The first ``keep`` dims never are.
    """
    dims = list(placed.dims)
    elements = math.prod(leaf.shape[keep:])
    free = [d for d in range(keep, len(dims)) if not dims[d] and leaf.shape[d] % size == 0]
    if elements < smallest:
        reason = Reason(f"not sharded over fsdp: only {counted(elements, 'element')}")
    elif not free:
        reason = _no_free_dim(leaf.shape, size)
    else:
        # Of dims of equal size take the last: rows of a kernel are contracted, columns are not.
        best = max(free, key=lambda d: (leaf.shape[d], d))
        dims[best] = ("fsdp",)
        reason = _on_dim("fsdp", best, leaf.shape[best], size)
    return Placement(leaf.path, tuple(dims), (*placed.reasons, reason))


def add_pipe(
    leaf: Leaf, placed: Placement, *, sizes: Mapping[str, int], smallest: int
) -> Placement:
    """Shard a leaf that every stage uses over the pipe axis, on its largest divisible dim.

    Stages gather it once per step; between steps, and in the optimizer, each holds a shard.
    """
    pieces = [math.prod(sizes.get(axis, 1) for axis in (*axes, "pipe")) for axes in placed.dims]
    divisible = [d for d, count in enumerate(pieces) if leaf.shape[d] % count == 0]
    if not divisible or leaf.size < smallest:
        return placed
    # Prefer a dim that no other axis shards: it is gathered in one piece.
    best = max(divisible, key=lambda d: (not placed.dims[d], leaf.shape[d], d))
    dims = list(placed.dims)
    dims[best] = (*dims[best], "pipe")
    reason = _on_dim("pipe", best, leaf.shape[best], pieces[best])
    return Placement(leaf.path, tuple(dims), (*placed.reasons, reason))


def on_each_stage(blocks: int, *, even: bool) -> Reason:
    """Return the reason for a stack whose blocks, at most so many each, are on different stages."""
    text = f"{'' if even else 'up to '}{counted(blocks, 'block')} on each stage"
    return Reason(text, of_stages=True)


def _on_dim(axis: str, dim: int, size: int, parts: int) -> Reason:
    text, in_block = (f"{axis} on dim {number}: {size} / {parts}" for number in (dim, dim - 1))
    return Reason(text, in_block)


def _no_free_dim(shape: Sequence[int], parts: int) -> Reason:
    def text(shape: Sequence[int]) -> str:
        sizes = "×".join(map(str, shape))
        why = f"no free dim of {sizes} is divisible by {parts}" if shape else "a scalar"
        return f"not sharded over fsdp: {why}"

    return Reason(text(shape), text(shape[1:]))
