"""Suggestions of better numbers of stages for a list of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from meshwright.pipeline.by_hand.balance import balance
from meshwright.pipeline.schedule.operations import Shape, Times
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.pipeline.schedule.timeline import Timeline, simulate


def timeline_of(schedule: Schedule, shape: Shape, costs: Sequence[int]) -> Timeline:
    """Return the timeline of stages whose times are proportional to their costs."""
    operations = schedule.operations(shape.num_microbatches, shape.num_stages)
    return simulate(operations, shape, Times.of_costs(costs))


def fewer_stages(
    costs: Sequence[int], flops: Sequence[int], shape: Shape, schedule: Schedule
) -> str:
    """Return what helps against unequal stages: fewer stages, or a slow layer divided.

    Args:
        costs: the cost of each layer by which stages are balanced.
        flops: the FLOPs of each layer.
        shape: the size of the pipeline.
        schedule: the schedule.
    """
    now = _layers_of_stages(costs, shape)
    slowest = max(now, key=lambda layers: sum(flops[n] for n in layers))
    only = f"divide layer {slowest[0]}, its only one, into several" if len(slowest) == 1 else ""
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
    return "; or ".join(filter(None, (better, only))) or "divide its layers into smaller ones"


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
