"""Splits a batch into microbatches without moving samples between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


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
