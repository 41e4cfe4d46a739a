"""Dividing a batch into microbatches without moving a sample from its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def split_strided(batch: Sequence[Any], count: int, mesh: Mesh, spec: PartitionSpec) -> list[Any]:
    """Return arrays [count, B / count, …]: microbatch m holds samples m, m + count, ….

    Taking every count-th sample keeps each sample where it is: a device that holds a contiguous
    piece of the batch holds a piece of every microbatch. Contiguous microbatches would be moved.
    ``spec`` is how the batch is divided.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, *spec))

    def split(array: Any) -> Any:
        rows = array.reshape(array.shape[0] // count, count, *array.shape[1:])
        return jax.lax.with_sharding_constraint(rows.swapaxes(0, 1), sharding)

    return [split(array) for array in batch]
