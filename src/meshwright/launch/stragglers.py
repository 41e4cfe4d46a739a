"""Stragglers: processes that are slower than the others, which wait for them in every update."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.runtime.heartbeat import Beat

SLOWER = 1.5
"""A straggler takes this many times as long as the median of the others."""
LEAST_SHARE = 0.1
"""And loses at least this share of an update, so that noise of microseconds does not count."""
WINDOW_SECONDS = 5.0
WINDOW_UPDATES = 10
LONGEST_WINDOW = 3600.0


@dataclass(frozen=True)
class Straggler:
    """A slow process.

    Attributes:
        rank: its number.
        what: what takes it long: its own work, or waiting for its input.
        seconds: its seconds per update for that.
        others: the median of the others.
        update_seconds: seconds of a whole update.
        updates: updates of the window.
    """

    rank: int
    what: str
    seconds: float
    others: float
    update_seconds: float
    updates: int

    def __str__(self) -> str:
        """Return a line with the ratio and the numbers it is made of."""
        ratio = self.seconds / max(self.others, 1e-6)
        ratio_text = f"{ratio:.1f}" if ratio < 100 else "over 100"
        return (
            f"process {self.rank} is slow: {self.what} takes {1000 * self.seconds:.1f} ms per "
            f"update, {ratio_text} times the median of the others "
            f"({1000 * self.others:.1f} ms), and an update {1000 * self.update_seconds:.0f} ms "
            f"(over {self.updates} updates); the others wait for it"
        )


class Stragglers:
    """Compares processes over a window of updates, which doubles whenever one has been named."""

    def __init__(self) -> None:
        self._start: dict[int, Beat] = {}
        self._seconds = WINDOW_SECONDS
        self._found: list[Straggler] = []

    def add(self, beats: Mapping[int, Beat]) -> None:
        """Add the newest beats of all processes."""
        training = {rank: beat for rank, beat in beats.items() if beat.first >= 0}
        if len(training) < 2:
            return
        begun = {rank: self._start.get(rank) for rank in training}
        # The first updates do one-time work.
        if any(
            start is None or start.first != training[rank].first for rank, start in begun.items()
        ):
            ready = all(beat.update > beat.first + 2 for beat in training.values())
            self._start = dict(training) if ready else {}
            return
        spans = [(self._start[rank], beat) for rank, beat in training.items()]
        long = all(new.time - old.time >= self._seconds for old, new in spans)
        if long and all(new.update - old.update >= WINDOW_UPDATES for old, new in spans):
            self._compare(training)
            self._start = dict(training)

    def take(self) -> list[Straggler]:
        """Return the stragglers found since the last call."""
        found, self._found = self._found, []
        return found

    def _compare(self, beats: Mapping[int, Beat]) -> None:
        found: list[Straggler] = []
        for what, kind in (("its own work", "own_work"), ("waiting for input", "input_wait")):
            each = {
                rank: (getattr(new, kind) - getattr(old, kind)) / (new.update - old.update)
                for rank, new in beats.items()
                for old in (self._start[rank],)
            }
            for rank, seconds in each.items():
                others = statistics.median(s for other, s in each.items() if other != rank)
                old, new = self._start[rank], beats[rank]
                updates = new.update - old.update
                whole = (new.useful - old.useful) / updates
                if seconds > SLOWER * others and seconds - others > LEAST_SHARE * whole:
                    found.append(Straggler(rank, what, seconds, others, whole, updates))
        self._found += found
        if found:
            self._seconds = min(2 * self._seconds, LONGEST_WINDOW)
