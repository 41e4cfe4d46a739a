"""Reading batches ahead of the training, on threads or in processes of their own, with Grain."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from meshwright.data.protocols import Data, HostBatch, OutOfData, Rows
from meshwright.errors import MeshwrightError

READ_THREADS = 2
"""Threads that read ahead in one process; NumPy copies without holding Python's lock."""


def load_batches(
    data: Data,
    *,
    batch_size: int,
    start: int = 0,
    stop: int | None = None,
    rows: Rows | None = None,
    workers: int = 0,
    prefetch: int = 4,
) -> BatchStream:
    """Read the batches of the updates ``start``, ``start + 1``, … up to ``stop``, ahead of time.

    Reading begins at once. Which batches come, and in which order, depends on neither ``workers``
    nor ``prefetch``.

    Args:
        data: where they come from.
        batch_size: samples of the global batch.
        start: the first update.
        stop: the update to stop before; None goes on until the data run out.
        rows: the places of the global batch to read; all by default.
        workers: processes that read; 0 reads on threads of this one.
        prefetch: batches read ahead; 0 reads each when it is asked for.
    """
    steps = grain.MapDataset.range(start, sys.maxsize if stop is None else stop)
    batches = steps.map(_Read(data, batch_size, rows))
    sequential = getattr(data, "sequential", False)
    workers = 0 if sequential else workers
    threads = min(prefetch, 1 if sequential else READ_THREADS)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    stream = batches.to_iter_dataset(options)
    if workers:
        _settle_flags()
        ahead = max(prefetch // workers, 1)
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
        )
    return BatchStream(iter(stream), shared=workers > 0)


def _settle_flags() -> None:
    """Give Grain's command-line flags their defaults: its processes read them, nobody parses them.

    A program that parses its own flags with absl has done so before it trains.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


class BatchStream(Iterator[HostBatch]):
    """Batches in the order of their updates; closing it ends the threads or processes behind it."""

    def __init__(self, stream: Any, *, shared: bool) -> None:
        self._stream: Any = stream
        self._shared = shared
        start = getattr(stream, "start_prefetch", None)
        if start is not None:
            start()

    def __next__(self) -> HostBatch:
        """Return the batch of the next update."""
        if self._stream is None:
            raise StopIteration
        try:
            found = next(self._stream)
        except BaseException:
            self.close()
            raise
        if isinstance(found, _Failed):
            self.close()
            raise found.error()
        # What another process read lies in memory shared with it, which is given back here.
        return jax.tree.map(np.array, found) if self._shared else found

    def close(self) -> None:
        """Stop reading; safe to call again."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        if self._shared and not sys.is_finalizing():
            # Grain's last batch is in a cycle, and would keep its shared memory past the end.
            del stream
            gc.collect()

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class _Read:
    """Reads one update's batch; what is wrong with the data travels as a value."""

    data: Data
    batch_size: int
    rows: Rows | None

    def __call__(self, step: int) -> Any:
        try:
            return self.data.batch(int(step), self.batch_size, self.rows)
        except OutOfData:
            return _Failed(StopIteration)
        except MeshwrightError as error:
            return _Failed(type(error), error.what, error.why, error.fix)


@dataclass(frozen=True)
class _Failed:
    """An error as its parts, which reach another process as they are."""

    kind: type[Exception]
    what: str = ""
    why: str = ""
    fix: str = ""

    def error(self) -> Exception:
        if issubclass(self.kind, MeshwrightError):
            return self.kind(self.what, why=self.why, fix=self.fix)
        return self.kind()
