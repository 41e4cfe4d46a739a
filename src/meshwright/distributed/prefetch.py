"""Prefetching: a thread that prepares the next items while the current one is in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Queue
from typing import NamedTuple

from meshwright.trees import PyTree


class _Item(NamedTuple):
    value: PyTree = None
    error: BaseException | None = None
    last: bool = False


def prefetch(
    source: Iterable[PyTree], prepare: Callable[[PyTree], PyTree], buffer_size: int
) -> Iterator[PyTree]:
    """Yield ``prepare(item)`` for each item, up to ``buffer_size`` items ahead of the consumer.

    The thread starts with the first request. An exception in the source or in ``prepare`` reaches
    the consumer after the items before it. If the consumer stops early (``break``, an exception,
    or a deleted iterator), the thread ends after its current item.
    """
    assert buffer_size >= 1
    queue: Queue[_Item] = Queue(maxsize=buffer_size)
    stop = threading.Event()
    # A daemon thread: a source that blocks forever must not keep the program alive.
    thread = threading.Thread(
        target=_produce, args=(source, prepare, queue, stop), name="prefetch", daemon=True
    )
    thread.start()
    try:
        while True:
            item = queue.get()
            if item.error is not None:
                raise item.error
            if item.last:
                return
            yield item.value
    finally:
        stop.set()
        _drain(queue)


def _produce(
    source: Iterable[PyTree],
    prepare: Callable[[PyTree], PyTree],
    queue: Queue[_Item],
    stop: threading.Event,
) -> None:
    try:
        for item in source:
            if stop.is_set():
                return
            queue.put(_Item(prepare(item)))
            if stop.is_set():
                return
    except BaseException as error:
        queue.put(_Item(error=error))
    else:
        queue.put(_Item(last=True))


def _drain(queue: Queue[_Item]) -> None:
    """Empty the queue, so that a thread blocked in `put` continues and sees the stop event."""
    while True:
        try:
            queue.get_nowait()
        except Empty:
            return
