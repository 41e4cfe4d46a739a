"""Dividing a list of layers into stages of about equal cost, and suggesting how many stages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from math import inf

from meshwright.errors import UserError
from meshwright.pipeline.schedule.operations import Shape, Times
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.pipeline.schedule.timeline import simulate
from meshwright.pipeline.schedule.timeline_drawing import Timeline


def balance(costs: Sequence[float], num_stages: int) -> list[range]:
    """Divide layers, in order, into stages so that the most expensive one is as cheap as possible.

    Of several such divisions, the most even one is returned: with the smallest sum of squares.
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

    ``measure`` takes the measure of the stages so far, and the start and end of the next stage.
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


def timeline_of(schedule: Schedule, shape: Shape, costs: Sequence[int]) -> Timeline:
    """Return the timeline of stages whose times are proportional to their costs."""
    operations = schedule.operations(shape.num_microbatches, shape.num_stages)
    return simulate(operations, shape, Times.of_costs(costs))


def fewer_stages(
    costs: Sequence[int], flops: Sequence[int], shape: Shape, schedule: Schedule
) -> str:
    """Return a remedy for unequal stages: fewer stages, or a slow layer split."""
    now = _layers_of_stages(costs, shape)
    slowest = max(now, key=lambda layers: sum(flops[n] for n in layers))
    only = f"split layer {slowest[0]}, its only one, into several" if len(slowest) == 1 else ""
    waits: dict[int, Fraction] = {}
    for count in range(2, shape.num_stages):
        if shape.num_chunks > 1 and shape.num_microbatches % count:
            continue
        smaller = replace(shape, num_stages=count)
        stages = _layers_of_stages(costs, smaller)
        each = [sum(flops[n] for n in layers) for layers in stages]
        waits[count] = timeline_of(schedule, smaller, each).bubble
    best = min(waits, key=lambda count: waits[count], default=0)
    better = f"num_stages={best} waits {float(waits[best]):.0%}" if best else ""
    return "; or ".join(filter(None, (better, only))) or "split its layers into smaller ones"


def _layers_of_stages(costs: Sequence[int], shape: Shape) -> list[list[int]]:
    groups = balance(costs, shape.num_virtual)
    starts = range(shape.num_stages)
    return [[n for group in groups[s :: shape.num_stages] for n in group] for s in starts]


def unused_devices(num_devices: int, num_stages: int, most_stages: int) -> str:
    """Return a warning with numbers of stages that use every device; empty if all are used."""
    left = num_devices % num_stages
    if not left:
        return ""
    fits = [n for n in range(1, most_stages + 1) if num_devices % n == 0]
    below, above = [n for n in fits if n < num_stages][-1:], [n for n in fits if n > num_stages][:1]
    better = " or ".join(f"num_stages={n}" for n in below + above)
    return (
        f"{left} of {num_devices} devices {'is' if left == 1 else 'are'} not used, since "
        f"{num_devices} is not a multiple of "
        f"{num_stages} stages; {better} uses all"
    )
