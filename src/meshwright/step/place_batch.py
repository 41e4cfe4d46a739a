"""Placing a host batch on the mesh, and splitting it into microbatches where it is."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshwright.trees import Batch


def local_rows(sharding: NamedSharding, batch_size: int) -> NDArray[np.int64] | None:
    """Return the rows of a global batch that this process's devices hold; None if it is alone."""
    if jax.process_count() == 1:
        return None
    held = [
        np.arange(batch_size)[index[0]]
        for device, index in sharding.devices_indices_map((batch_size,)).items()
        if device.process_index == jax.process_index()
    ]
    return np.unique(np.concatenate(held)).astype(np.int64)


def place_batch(
    batch: Batch, sharding: NamedSharding, batch_size: int, rows: NDArray[np.int64] | None = None
) -> list[Any]:
    """Return the leaves of a global batch, or of the rows of it this process holds, on the mesh."""
    leaves = jax.tree.leaves(batch)
    if rows is None:
        return [jax.device_put(leaf, sharding) for leaf in leaves]

    def place(leaf: Any) -> Any:
        def piece(index: Any) -> Any:
            first, last, _ = index[0].indices(batch_size)
            start = int(np.searchsorted(rows, first))
            return leaf[(slice(start, start + last - first), *index[1:])]

        return jax.make_array_from_callback((batch_size, *leaf.shape[1:]), sharding, piece)

    return [place(leaf) for leaf in leaves]


def split_strided(batch: Sequence[Any], count: int, mesh: Mesh, spec: PartitionSpec) -> list[Any]:
    """Return arrays [count, B / count, …]: microbatch m holds samples m, m + count, ….

    A device holds contiguous samples of the batch. With every count-th sample in a microbatch, it
    holds a part of every microbatch; contiguous microbatches would have to be moved. ``spec`` is
    the partition spec of the batch.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, *spec))

    def split(array: Any) -> Any:
        rows = array.reshape(array.shape[0] // count, count, *array.shape[1:])
        return jax.lax.with_sharding_constraint(rows.swapaxes(0, 1), sharding)

    return [split(array) for array in batch]
