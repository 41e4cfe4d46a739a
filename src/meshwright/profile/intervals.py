"""Sorted, non-overlapping time intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end, in nanoseconds."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, sorted and without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return ``whole`` without ``taken``; both must be merged."""
    left: list[Interval] = []
    position = 0
    for start, end in whole:
        while position < len(taken) and taken[position][1] <= start:
            position += 1
        at = position
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals inside a window, merged."""
    first, last = window
    return merge((max(start, first), min(end, last)) for start, end in intervals)


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of merged intervals, in nanoseconds."""
    return sum(end - start for start, end in intervals)
