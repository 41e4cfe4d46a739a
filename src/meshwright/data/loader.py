"""Reading batches ahead of training with Grain, in threads or in separate processes."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from absl import flags

from meshwright.data.protocols import Data, HostBatch, OutOfData, Rows, refuse_none
from meshwright.errors import (
    EnvironmentProblem,
    MeshwrightError,
    Setting,
    Spelling,
    UserError,
    current_spelling,
    spelled_for,
)
from meshwright.runtime.user_code import doing

READ_THREADS = 2
"""Threads that read ahead in one process; NumPy copies without holding the GIL."""


_WORKER_ENDED = re.compile(r"Worker process was terminated unexpectedly with exit code (-?\d+)")
"""What Grain raises if a process that reads data is gone."""


def _worker_ended(code: int) -> EnvironmentProblem:
    how = f"it was killed by signal {-code}" if code < 0 else f"its exit code is {code}"
    return EnvironmentProblem(
        "a process that reads data has ended",
        why=f"{how}; a machine without free memory kills processes (signal 9)",
        fix=f"write {Setting('data.workers', 0)} to read in this process",
    )


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
    """Read the batches of the steps ``start``, ``start + 1``, … up to ``stop``, ahead of time.

    Reading begins at once, in ``workers`` processes, or in threads if there are none. Which
    batches come, and in which order, depends on neither ``workers`` nor ``prefetch``, which may be
    0 to read each when it is needed. Without ``stop``, the data end; without ``rows``, all rows of
    the global batch are read.
    """
    # Most commands read no data, and Grain takes long to import.
    import grain

    prefetch = prefetch if data.read_ahead else 0
    steps = grain.MapDataset.range(start, sys.maxsize if stop is None else stop)
    batches = steps.map(_Read(data, batch_size, rows))
    workers = 0 if data.sequential else workers
    threads = min(prefetch, 1 if data.sequential else READ_THREADS)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    stream = batches.to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():
            # Grain's flags get their defaults. A program that parses flags has done so by now.
            flags.FLAGS.mark_as_parsed()
        ahead = max(prefetch // workers, 1)
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
        )
        _share_no_locks(stream)
    return BatchStream(iter(stream), shared=workers > 0)


def _share_no_locks(stream: Any) -> None:
    """Let the processes of a stream learn without locks when to stop.

    A process that is killed while it holds a lock never gives it back, and Grain would wait for it
    forever: while it reads, when it is closed, and when the interpreter ends.
    """
    import grain

    class Reader(grain.IterDataset[Any]):
        """One of the processes."""

        def __iter__(self) -> grain.DatasetIterator[Any]:
            reader: Any = self._parent.__iter__()
            reader._prefetch_should_stop = _Flag()
            # These streams are never set to another state.
            reader._set_state_request_count = SimpleNamespace(value=0, get_lock=nullcontext)
            return reader

    (interleaved,) = stream.parents
    interleaved._datasets = [Reader(each) for each in interleaved._datasets]


class _Flag:
    """An event of two processes that nobody waits for."""

    def __init__(self) -> None:
        self._value: Any = get_context("spawn").RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = 1

    def clear(self) -> None:
        self._value.value = 0


class BatchStream(Iterator[HostBatch]):
    """An iterator over the batches of steps; closing it ends its threads or processes."""

    def __init__(self, stream: Any, *, shared: bool) -> None:
        self._stream: Any = stream
        self._shared = shared
        if (start := getattr(stream, "start_prefetch", None)) is not None:
            start()

    def __next__(self) -> HostBatch:
        """Return the batch of the next step."""
        if self._stream is None:
            raise StopIteration
        try:
            batch = next(self._stream)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and (found := _WORKER_ENDED.search(str(error))):
                raise _worker_ended(int(found[1])) from None
            raise
        if isinstance(batch, Exception):
            self.close()
            raise batch.with_traceback(None)
        # A batch read by another process is in shared memory, which is freed once it is copied.
        return jax.tree.map(np.array, batch) if self._shared else batch

    def close(self) -> None:
        """Stop reading; safe to call again."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        if self._shared and not sys.is_finalizing():
            # Grain's last batch is in a reference cycle, which would keep its shared memory alive.
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
    """Reads the batch of one step; errors in the data are returned as values."""

    data: Data
    batch_size: int
    rows: Rows | None
    spelling: Spelling = field(default_factory=current_spelling)

    def __call__(self, step: int) -> Any:
        try:
            # This runs in another thread or process.
            with spelled_for(self.spelling), doing(f"reading batch {step}"):
                batch = self.data.batch(int(step), self.batch_size, self.rows)
                # Grain would leave None out, and give every step after it another batch.
                return refuse_none(batch, self.data.batch_name(int(step)))
        except (OutOfData, StopIteration):
            if self.data.may_end:
                return StopIteration()
            return UserError(
                f"{self.data.batch_name(step)} does not exist",
                why=f"reading it raised StopIteration, and the data have "
                f"{self.data.num_samples:,} samples for every epoch",
                fix="return a row for every number of a sample",
            )
        except MeshwrightError as error:
            return error
