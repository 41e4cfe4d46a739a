"""The batch loader: reads batches ahead in their global order and places them on the mesh."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from jax.sharding import NamedSharding

from meshwright.data.batches import read_batches
from meshwright.data.loader import load_batches
from meshwright.data.protocols import Data
from meshwright.processes import agree, process_count
from meshwright.runtime.heartbeat import Doing, own_heartbeat
from meshwright.step.place_batch import local_rows, place_batch


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
            loaded.close()

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
        """Whether all processes have a batch; data of unknown size may end earlier in one."""
        # Asking each time costs a round trip.
        if process_count() == 1 or self.data.has_every_batch:
            return batch is not None
        # The others may wait for a process with slow data, which is no wait for their own.
        with own_heartbeat().during(Doing.WAITING):
            return agree(batch is not None, "all")
