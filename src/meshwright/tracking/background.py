"""A tracker that runs in a background thread, so that a slow service does not slow training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.tracking.tracker import Tracker

MAX_QUEUED = 10_000
"""Calls that may be queued; more means that the service does not keep up."""


class Background:
    """Calls a tracker in order, in another thread.

    What the tracker raises there is raised by the next call here.

    Args:
        tracker: the tracker to call.
        close_seconds: how long ``close`` may wait for queued calls.
    """

    def __init__(self, tracker: Tracker, *, close_seconds: float = 30.0) -> None:
        self._tracker = tracker
        self._close_seconds = close_seconds
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._failure: Exception | None = None
        # A daemon, so that a service that never answers does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)

    def start(self, facts: Mapping[str, Any]) -> None:
        """Start the thread, and the tracker in it."""
        self._thread.start()
        self._enqueue(lambda: self._tracker.start(facts))

    def log(self, split: str, update: int, values: Mapping[str, float]) -> None:
        """Queue metrics."""
        self._enqueue(lambda: self._tracker.log(split, update, values))

    def event(self, kind: str, update: int, message: str, details: Mapping[str, Any]) -> None:
        """Queue an event."""
        self._enqueue(lambda: self._tracker.event(kind, update, message, details))

    def close(self, result: Mapping[str, Any]) -> None:
        """Queue the result, and wait for the queue to empty."""
        self._enqueue(lambda: self._tracker.close(result))
        self._queue.put(None)
        self._thread.join(self._close_seconds)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"it did not answer within {self._close_seconds:g} s")

    def _enqueue(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"{MAX_QUEUED} calls are waiting for it") from None

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception as error:
                self._failure = error
                return
