"""Which source of a mixture gives each row: at every row, each has had its share to within one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Rows that are assigned together."""

Shares = tuple[Fraction, ...]
"""The share of each source, which add up to 1."""


class Stage(NamedTuple):
    """Rows with the same shares.

    Attributes:
        start: the first row.
        shares: the shares from there on.
    """

    start: int
    shares: Shares


class Place(NamedTuple):
    """Where an assignment is.

    Attributes:
        row: rows assigned so far.
        owed: what each source is owed of them: its share less the rows it gave, in parts of a row.
        counts: the rows that each source gave.
    """

    row: int
    owed: tuple[int, ...]
    counts: tuple[int, ...]


class Turns:
    """Assigns rows to sources, one by one, so that none is ever a whole row ahead or behind.

    Rows are jobs with deadlines (Tijdeman's chairman assignment): of the sources that may give a
    row without getting too far ahead, the one that would first be too far behind gives it. The
    source that is owed most would not do: with many small shares, several are due at once.

    A row depends on the stages alone.

    Args:
        stages: the stages, the first from row 0 on.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        parts = [share.denominator for stage in stages for share in stage.shares]
        self._parts = math.lcm(*parts)
        nothing = (0,) * len(stages[0].shares)
        self._last = Place(0, nothing, nothing)

    def at(self, row: int) -> Place:
        """Return where the assignment is before a row."""
        place = self._last
        if place.row > row:
            place = Place(0, *(((0,) * len(place.counts),) * 2))
        while place.row < row:
            place, _ = self._advance(place, row)
        # One assignment, because several threads read ahead.
        self._last = place
        return place

    def rows(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each of some rows, and the number of the row within its source."""
        place, chosen = self.at(start), list[NDArray[np.int64]]()
        before = np.array(place.counts, np.int64)
        while place.row < start + count:
            place, more = self._advance(place, start + count)
            chosen.append(more)
        sources = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        numbers = np.empty_like(sources)
        for source, first in enumerate(before):
            own = sources == source
            numbers[own] = first + np.arange(own.sum())
        return sources, numbers

    def expected(self, row: int) -> list[Fraction]:
        """Return the sum of each source's shares over the rows before one."""
        place = self.at(row)
        both = zip(place.owed, place.counts, strict=True)
        return [Fraction(owed, self._parts) + count for owed, count in both]

    def _advance(self, place: Place, until: int) -> tuple[Place, NDArray[np.int64]]:
        """Assign some rows, at most until one."""
        stage = [stage for stage in self.stages if stage.start <= place.row][-1]
        later = [stage.start for stage in self.stages if stage.start > place.row]
        shares = tuple(int(share * self._parts) for share in stage.shares)
        size = min([until, *later]) - place.row
        chosen = _block(shares, self._parts, place.owed)[:size]
        own = np.bincount(chosen, minlength=len(shares)).tolist()
        rows = zip(place.owed, shares, own, strict=True)
        owed = tuple(due + share * len(chosen) - self._parts * n for due, share, n in rows)
        counts = tuple(a + b for a, b in zip(place.counts, own, strict=True))
        return Place(place.row + len(chosen), owed, counts), chosen


@lru_cache(maxsize=4096)
def _block(shares: tuple[int, ...], parts: int, owed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the sources of the next rows.

    Args:
        shares: the share of each source, in parts of a row.
        parts: the parts of a row.
        owed: what each source is owed, in parts of a row.
    """
    # A source is never owed more than parts · (1 - 1/slack), nor less than its negative.
    slack = max(2 * len(shares) - 2, 1)
    due, chosen = list(owed), np.empty(BLOCK, np.int64)
    everyone = range(len(shares))
    for row in range(BLOCK):
        due = [a + b for a, b in zip(due, shares, strict=True)]
        able = [n for n in everyone if slack * due[n] >= parts and shares[n]]
        # Rows it can wait before it is owed too much. After a change, nobody may be able.
        waits = [((slack - 1) * parts - slack * due[n]) // (slack * shares[n]) for n in able]
        first = able[waits.index(min(waits))] if able else due.index(max(due))
        due[first] -= parts
        chosen[row] = first
    return chosen
