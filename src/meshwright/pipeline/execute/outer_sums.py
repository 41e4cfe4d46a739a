"""Gradients of the weights outside the blocks: summed over the stages, each keeping its part."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshwright.mesh.axes import PIPE
from meshwright.pipeline.aliases import Array, LeafValues
from meshwright.sharding.placement import Placement


class OuterSums:
    """Adds up what the devices of all stages have computed.

    Args:
        mesh: the mesh.
        batch_axes: axes whose devices have sums of their own, besides the stages.
        sums: by number of the step leaf, the layout of its sum on one stage.
        gradients: by number of the step leaf, the placement of its gradient afterwards.
    """

    def __init__(
        self,
        mesh: Mesh,
        batch_axes: Sequence[str],
        sums: Sequence[PartitionSpec],
        gradients: Sequence[Placement],
    ) -> None:
        self._mesh, self._axes = mesh, tuple(batch_axes)
        self._sums, self._gradients = sums, gradients
        self.stacked = PartitionSpec((PIPE, *batch_axes))
        """The layout of the sums of all devices, stacked: a new dim 0 counts the devices."""

    def reduced(self, stacked: LeafValues) -> LeafValues:
        """Return the gradients, in their placement.

        No axis is left to the compiler, which would gather what other axes divide before it
        divides a sum over the stages.
        """
        if not stacked:
            return {}
        each = jax.shard_map(
            lambda values: {n: self._reduce(n, value[0]) for n, value in values.items()},
            mesh=self._mesh,
            in_specs=({n: PartitionSpec(*self.stacked, *self._sums[n]) for n in stacked},),
            out_specs={n: self._after(n) for n in stacked},
            check_vma=False,
        )
        return each(stacked)

    def _reduce(self, number: int, total: Array) -> Array:
        dim = self._divided_dim(number)
        if dim is None:
            return lax.psum(total, (PIPE, *self._axes))
        part = lax.psum_scatter(total, PIPE, scatter_dimension=dim, tiled=True)
        return lax.psum(part, self._axes) if self._axes else part

    def _divided_dim(self, number: int) -> int | None:
        dims = self._gradients[number].dims
        return next((dim for dim, axes in enumerate(dims) if PIPE in axes), None)

    def _after(self, number: int) -> PartitionSpec:
        """Return the layout of a sum of which each stage keeps its part, as in its placement."""
        entries = [*self._sums[number]]
        dim = self._divided_dim(number)
        if dim is None:
            return PartitionSpec(*entries)
        entries += [None] * (dim + 1 - len(entries))
        before = entries[dim] or ()
        entries[dim] = (*((before,) if isinstance(before, str) else before), PIPE)
        return PartitionSpec(*entries)
