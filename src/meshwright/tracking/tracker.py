"""Trackers: one that records nothing, several as one, and one that is called in a thread."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.errors import first_line
from meshwright.text.masking import mask_text, mask_tree

logger = logging.getLogger("meshwright.tracking")


class Tracker:
    """Records a run; this one records nothing, as in every process but process 0.

    `start` is called first and `close` last, each once.
    """

    def start(self, facts: Mapping[str, Any]) -> None:
        """Record what is known before the first step: the content of run.json."""

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of ``split`` (train or eval) after this many steps."""

    def event(self, kind: str, step: int, message: str, details: Mapping[str, Any]) -> None:
        """Record an event: a checkpoint, a warning, a stop."""

    def close(self, result: Mapping[str, Any]) -> None:
        """Record the content of result.json (after most failures empty) and release resources."""


class Trackers(Tracker):
    """Calls several trackers; one that raises an exception is no longer called.

    The others receive the failure once, as a warning event.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @property
    def names(self) -> Sequence[str]:
        """The names of those that have not failed."""
        return tuple(self._trackers)

    def start(self, facts: Mapping[str, Any]) -> None:
        """Start each tracker."""
        self._each(0, lambda tracker: tracker.start(facts))

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Pass the metrics to each tracker as plain numbers."""
        numbers = {n: v if isinstance(v, int) else float(v) for n, v in values.items()}
        self._each(step, lambda tracker: tracker.log(split, step, numbers))

    def event(self, kind: str, step: int, message: str, details: Mapping[str, Any]) -> None:
        """Pass the event to each tracker, without secrets."""
        shown, others = mask_text(message), mask_tree(details)
        self._each(step, lambda tracker: tracker.event(kind, step, shown, others))

    def close(self, result: Mapping[str, Any]) -> None:
        """Close each tracker, the first one last, so that it receives the others' failures."""
        for name in reversed(self.names):
            self._try(name, 0, lambda tracker: tracker.close(result))
            self._trackers.pop(name, None)

    def _each(self, step: int, call: Callable[[Tracker], None]) -> None:
        for name in self.names:
            self._try(name, step, call)

    def _try(self, name: str, step: int, call: Callable[[Tracker], None]) -> None:
        if name not in self._trackers:
            return
        try:
            call(self._trackers[name])
        except Exception as error:
            # A service or a disk that fails must not end the run.
            del self._trackers[name]
            message = f"tracking by {name} stopped: {first_line(error)}"
            self.event("warning", step, message, {"tracker": name})
            if not self._trackers:
                logger.warning("%s", mask_text(message))


MAX_QUEUED = 10_000
"""Calls that may be queued; more means that the service does not keep up."""


class Background(Tracker):
    """Calls a tracker in order, in another thread; ``close`` waits for queued calls.

    What the tracker raises there is raised by the next call here.
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

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Queue metrics."""
        self._enqueue(lambda: self._tracker.log(split, step, values))

    def event(self, kind: str, step: int, message: str, details: Mapping[str, Any]) -> None:
        """Queue an event."""
        self._enqueue(lambda: self._tracker.event(kind, step, message, details))

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
