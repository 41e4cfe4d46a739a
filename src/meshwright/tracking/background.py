"""A tracker on a thread of its own, so that a slow service does not slow the training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.tracking.tracker import Tracker

MAX_QUEUED = 10_000
"""Messages that may wait for a service; more means that it does not keep up at all."""


class Background:
    """Passes on what it is told in order, on another thread.

    What the tracker raises there is raised here at the next call.

    Args:
        tracker: whom to tell.
        close_seconds: how long the end of a run may wait for what is still to be told.
    """

    def __init__(self, tracker: Tracker, *, close_seconds: float = 30.0) -> None:
        self._tracker = tracker
        self._close_seconds = close_seconds
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._failure: Exception | None = None
        # A daemon, so that a service that never answers does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)

    def start(self, facts: Mapping[str, Any]) -> None:
        """Start the thread and the tracker on it."""
        self._thread.start()
        self._tell(lambda: self._tracker.start(facts))

    def log(self, split: str, update: int, values: Mapping[str, float]) -> None:
        """Pass on metrics."""
        self._tell(lambda: self._tracker.log(split, update, values))

    def event(self, kind: str, update: int, message: str, details: Mapping[str, Any]) -> None:
        """Pass on an event."""
        self._tell(lambda: self._tracker.event(kind, update, message, details))

    def close(self, result: Mapping[str, Any]) -> None:
        """Pass on the result, and wait a while until everything has been told."""
        self._tell(lambda: self._tracker.close(result))
        self._waiting.put(None)
        self._thread.join(self._close_seconds)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"it did not answer within {self._close_seconds:g} s")

    def _tell(self, call: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"{MAX_QUEUED} messages are waiting for it") from None

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                call()
            except Exception as error:
                self._failure = error
                return
