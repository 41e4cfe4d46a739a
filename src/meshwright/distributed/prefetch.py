"""Prefetching: a thread that prepares the next items while the current one is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Queue
from typing import Any, NamedTuple


class _Item(NamedTuple):
    value: Any = None
    error: BaseException | None = None
    last: bool = False


def prefetch(
    source: Iterable[Any], prepare: Callable[[Any], Any], buffer_size: int
) -> Iterator[Any]:
    """Yield ``prepare(item)`` for each item, up to ``buffer_size`` items ahead of the consumer.

    The thread starts with the first item asked for. An exception in the source or in ``prepare``
    reaches the consumer after the items before it. When the consumer stops early (``break``, an
    exception, or dropping the iterator), the thread ends after the item it is working on.
    """
    assert buffer_size >= 1
    queue: Queue[_Item] = Queue(maxsize=buffer_size)
    stop = threading.Event()
    # A daemon, because a source that blocks for ever must not keep the program alive.
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
    source: Iterable[Any],
    prepare: Callable[[Any], Any],
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
    """Make room, so that a thread waiting to put its item can go on and see the stop."""
    while True:
        try:
            queue.get_nowait()
        except Empty:
            return
