"""Dividing a list of layers into stages that cost about the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from meshwright.errors import UserError


def balance(costs: Sequence[float], num_stages: int) -> list[range]:
    """Divide layers, in order, into stages so that the most expensive one is as cheap as possible.

    Of several such divisions, the most even one is returned: that with the smallest sum of squares.

    Args:
        costs: the cost of each layer: FLOPs, bytes or time.
        num_stages: number of stages.
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise UserError(
            f"{count} layers cannot be divided into {num_stages} stages",
            why="each stage needs at least one layer",
            fix=f"use at most {count} stages",
        )
    sums = list(accumulate(costs, initial=0))

    def largest(before: float, start: int, end: int) -> float:
        return max(before, sums[end] - sums[start])

    bound, _ = _best(count, num_stages, largest)

    def squares(before: float, start: int, end: int) -> float:
        cost = sums[end] - sums[start]
        return before + cost * cost if cost <= bound else inf

    _, groups = _best(count, num_stages, squares)
    return groups


def _best(
    count: int, num_stages: int, measure: Callable[[float, int, int], float]
) -> tuple[float, list[range]]:
    """Return the smallest measure of a division, and the division.

    Args:
        count: number of layers.
        num_stages: number of stages.
        measure: from the measure of the stages so far, and the start and end of the next stage, to
            the measure of all of them.
    """
    # best[n]: the smallest measure of the first n layers in the stages added so far.
    best: list[float] = [0.0] + [inf] * count
    cuts: list[list[int]] = []
    for stages in range(1, num_stages + 1):
        row, where = [inf] * (count + 1), [0] * (count + 1)
        for end in range(stages, count + 1):
            for start in range(stages - 1, end):
                value = measure(best[start], start, end)
                # Of equal divisions take the one with the later cut: earlier stages wait less.
                if value <= row[end]:
                    row[end], where[end] = value, start
        best = row
        cuts.append(where)
    groups: list[range] = []
    end = count
    for where in reversed(cuts):
        groups.append(range(where[end], end))
        end = where[end]
    return best[count], groups[::-1]
