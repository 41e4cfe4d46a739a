"""Dividing a list of layers into stages that cost about the same."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import UserError


def balance(costs: Sequence[float], num_stages: int) -> list[range]:
    """Divide layers, in order, into stages such that the most expensive stage is cheapest.

    Args:
        costs: what each layer costs: FLOPs, bytes or time.
        num_stages: how many stages.
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise UserError(
            f"{count} layers cannot be divided into {num_stages} stages",
            why="each stage needs at least one layer",
            fix=f"use at most {count} stages",
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[s][n]: the cheapest possible most expensive stage of the first n layers in s stages.
    best = [[0.0] + [float("inf")] * count]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for stages in range(1, num_stages + 1):
        row, where = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stages, count + 1):
            for start in range(stages - 1, end):
                worst = max(best[-1][start], sums[end] - sums[start])
                # Of equal divisions the one with the later cut: earlier stages wait less.
                if worst <= row[end]:
                    row[end], where[end] = worst, start
        best.append(row)
        cuts.append(where)
    found: list[range] = []
    end = count
    for stages in range(num_stages, 0, -1):
        start = cuts[stages][end]
        found.append(range(start, end))
        end = start
    return found[::-1]
