"""Prefetching: a thread that prepares the next items while the current one is in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, Queue

from meshwright.trees import PyTree


def prefetch(
    source: Iterable[PyTree], prepare: Callable[[PyTree], PyTree], buffer_size: int
) -> Iterator[PyTree]:
    """Yield ``prepare(item)`` for each item, up to ``buffer_size`` items ahead of the consumer.

    The thread starts with the first request. An exception in the source or in ``prepare`` reaches
    the consumer after the items before it. If the consumer stops early (``break``, an exception,
    or a deleted iterator), the thread ends after its current item.
    """
    assert buffer_size >= 1
    queue: Queue[tuple[PyTree, BaseException | None] | None] = Queue(maxsize=buffer_size)
    stop = threading.Event()

    def produce() -> None:
        try:
            for item in source:
                if not stop.is_set():
                    queue.put((prepare(item), None))
                if stop.is_set():
                    return
        except BaseException as error:
            queue.put((None, error))
        else:
            queue.put(None)

    # A daemon thread: a source that blocks forever must not keep the program alive.
    threading.Thread(target=produce, name="prefetch", daemon=True).start()
    try:
        while (item := queue.get()) is not None:
            value, error = item
            if error is not None:
                raise error
            yield value
    finally:
        stop.set()
        # Emptied, the queue takes what the thread is blocked with, which then sees the event.
        with suppress(Empty):
            while True:
                queue.get_nowait()
