"""The batch loader: reads batches ahead in their global order and places them on the mesh."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from meshwright.data.batches import read_batches
from meshwright.data.feed import Data
from meshwright.data.loader import load_batches
from meshwright.processes import agree, process_count


class BatchLoader:
    """Loads the batches of a run, one per update, onto the devices.

    Args:
        data: the samples.
        batch_size: samples per global batch.
        sharding: sharding of every array of a batch.
        workers: processes that read ahead; 0 reads in threads of this process.
        prefetch: batches to read ahead.

    Attributes:
        waited: seconds spent waiting for batches.
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int,
        sharding: NamedSharding,
        workers: int = 0,
        prefetch: int = 4,
    ) -> None:
        self.data = data
        self.waited = 0.0
        self._batch_size = batch_size
        self._sharding = sharding
        self._workers, self._prefetch = workers, prefetch
        self._rows = local_rows(sharding, batch_size) if process_count() > 1 else None

    @contextmanager
    def open(self, start: int, stop: int | None) -> Generator[Iterator[list[Any]]]:
        """Iterate over the batches from update ``start`` on; reading ends with the block."""
        loaded = load_batches(
            self.data,
            batch_size=self._batch_size,
            start=start,
            stop=stop,
            rows=self._rows,
            workers=self._workers,
            prefetch=self._prefetch,
        )
        try:
            yield self._placed(loaded)
        finally:
            close = getattr(loaded, "close", None)
            if close is not None:
                close()

    def _placed(self, loaded: Iterator[Any]) -> Iterator[list[Any]]:
        batches = read_batches(loaded)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - started
            if not self._all_have(batch):
                return
            yield place_batch(batch, self._sharding, self._batch_size, self._rows)

    def _all_have(self, batch: Any) -> bool:
        """Whether all processes have a batch; data of unknown length may end earlier in one."""
        if process_count() == 1 or self.data.num_samples is not None:
            return batch is not None
        return agree(batch is not None, "all")


def local_rows(sharding: NamedSharding, batch_size: int) -> NDArray[np.int64]:
    """Return the rows of a global batch that the devices of this process hold, in order."""
    held = [
        np.arange(batch_size)[index[0]]
        for device, index in sharding.devices_indices_map((batch_size,)).items()
        if device.process_index == jax.process_index()
    ]
    return np.unique(np.concatenate(held)).astype(np.int64)


def place_batch(
    batch: Any, sharding: NamedSharding, batch_size: int, rows: NDArray[np.int64] | None = None
) -> list[Any]:
    """Place a batch's arrays on the mesh.

    Args:
        batch: the global batch, or the ``rows`` of it that this process holds.
        sharding: sharding of every array.
        batch_size: samples of the global batch.
        rows: positions of these rows in the global batch; None if all are there.
    """
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
