"""Which source of a mixture gives each row: at every row, each has had its share to within one."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Rows that are assigned together."""

Stage = tuple[int, tuple[Fraction, ...]]
"""The first row of some, and the share of each source from there on; shares add up to 1."""


class Place(NamedTuple):
    """Where an assignment is: rows so far, and how many each source gave.

    ``owed`` is the share of each source in them, less its count, in parts of a row.
    """

    row: int
    counts: tuple[int, ...]
    owed: tuple[int, ...]


class Turns:
    """Assigns rows to sources, so that none is ever a whole row ahead or behind.

    Rows are jobs with deadlines (Tijdeman's chairman assignment): of the sources that may give a
    row without getting too far ahead, the one that would first be too far behind gives it. The
    source that is owed most would not do: with many small shares, several are due at once.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        self.parts = math.lcm(*(share.denominator for _, own in stages for share in own))
        nothing = (0,) * len(stages[0][1])
        self._first = self._last = Place(0, nothing, nothing)

    def at(self, row: int) -> Place:
        """Return where the assignment is before a row."""
        place = self._last if self._last.row <= row else self._first
        while place.row < row:
            place, _ = self._advance(place, row)
        # Set at once, because several threads read ahead.
        self._last = place
        return place

    def rows(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each of some rows, and the number of the row within its source."""
        place = first = self.at(start)
        chosen = [np.empty(0, np.int64)]
        while place.row < start + count:
            place, more = self._advance(place, start + count)
            chosen.append(more)
        sources = np.concatenate(chosen)
        numbers = np.empty_like(sources)
        for source, before in enumerate(first.counts):
            own = sources == source
            numbers[own] = before + np.arange(own.sum())
        return sources, numbers

    def _advance(self, place: Place, until: int) -> tuple[Place, NDArray[np.int64]]:
        """Assign some rows, at most until one."""
        shares = next(own for start, own in reversed(self.stages) if start <= place.row)
        until = min([until, *(start for start, _ in self.stages if start > place.row)])
        scaled = tuple(int(share * self.parts) for share in shares)
        chosen = _block(scaled, self.parts, place.owed)[: until - place.row]
        own = np.bincount(chosen, minlength=len(shares)).tolist()
        rows = zip(place.owed, scaled, own, strict=True)
        owed = tuple(due + share * len(chosen) - self.parts * n for due, share, n in rows)
        counts = tuple(a + b for a, b in zip(place.counts, own, strict=True))
        return Place(place.row + len(chosen), counts, owed), chosen


@lru_cache(maxsize=4096)
def _block(shares: tuple[int, ...], parts: int, owed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the sources of the next rows; shares and what is owed are in parts of a row."""
    # A source is never owed more than parts · (1 - 1/slack), nor less than its negative.
    slack = max(2 * len(shares) - 2, 1)
    due, chosen = list(owed), np.empty(BLOCK, np.int64)
    for row in range(BLOCK):
        due = [a + b for a, b in zip(due, shares, strict=True)]
        able = [n for n, share in enumerate(shares) if slack * due[n] >= parts and share]
        # Rows it can wait before it is owed too much. After a change, nobody may be able.
        waits = [((slack - 1) * parts - slack * due[n]) // (slack * shares[n]) for n in able]
        first = able[waits.index(min(waits))] if able else due.index(max(due))
        due[first] -= parts
        chosen[row] = first
    return chosen
