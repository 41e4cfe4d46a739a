"""What a tracker is, the one that tells nobody, and the one that tells several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from meshwright.errors import first_line

logger = logging.getLogger("meshwright.tracking")


class Tracker(Protocol):
    """Someone who is told about a run; `start` comes first and `close` last, each once."""

    def start(self, facts: Mapping[str, Any]) -> None:
        """Take what is known before the first update: the content of run.json."""
        ...

    def log(self, split: str, update: int, values: Mapping[str, float]) -> None:
        """Take the metrics of ``split`` (train or eval) after so many updates."""
        ...

    def event(self, kind: str, update: int, message: str, details: Mapping[str, Any]) -> None:
        """Take something that happened: a checkpoint, a warning, a stop."""
        ...

    def close(self, result: Mapping[str, Any]) -> None:
        """Take the content of result.json, empty after a failure, and let go of everything."""
        ...


class NullTracker:
    """Tells nobody; stands in for the trackers of every process but the main one."""

    def start(self, facts: Mapping[str, Any]) -> None:
        """Do nothing."""

    def log(self, split: str, update: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def event(self, kind: str, update: int, message: str, details: Mapping[str, Any]) -> None:
        """Do nothing."""

    def close(self, result: Mapping[str, Any]) -> None:
        """Do nothing."""


class Trackers:
    """Tells several trackers by name; one that raises is left out from then on.

    The failure is told once, as a warning event, to those that remain.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @property
    def names(self) -> Sequence[str]:
        """The names of those that have not failed."""
        return tuple(self._trackers)

    def start(self, facts: Mapping[str, Any]) -> None:
        """Start each."""
        self._each(0, lambda tracker: tracker.start(facts))

    def log(self, split: str, update: int, values: Mapping[str, float]) -> None:
        """Tell each the same plain numbers, whatever kind of scalar they came as."""
        numbers = {name: _number(value) for name, value in values.items()}
        self._each(update, lambda tracker: tracker.log(split, update, numbers))

    def event(self, kind: str, update: int, message: str, details: Mapping[str, Any]) -> None:
        """Tell each what happened."""
        self._each(update, lambda tracker: tracker.event(kind, update, message, details))

    def close(self, result: Mapping[str, Any]) -> None:
        """Close each, the first one last, so that it hears of the others' failures."""
        for name in reversed(self.names):
            self._try(name, 0, lambda tracker: tracker.close(result))
            self._trackers.pop(name, None)

    def _each(self, update: int, call: Callable[[Tracker], None]) -> None:
        for name in self.names:
            self._try(name, update, call)

    def _try(self, name: str, update: int, call: Callable[[Tracker], None]) -> None:
        if name not in self._trackers:
            return
        try:
            call(self._trackers[name])
        except Exception as error:
            # Whatever a service or a disk does to a tracker must not end the training.
            del self._trackers[name]
            reason = first_line(error)
            message = f"tracking by {name} stopped: {reason}"
            self.event("warning", update, message, {"tracker": name})
            if not self._trackers:
                logger.warning("%s", message)


def _number(value: Any) -> float:
    return value if isinstance(value, int) else float(value)
