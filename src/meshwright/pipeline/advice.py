"""Warnings about pipelines that wait too much, with the numbers and the better setting."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from meshwright.pipeline.schedules import Schedule

MICROBATCHES_PER_STAGE = 4
"""Below this many, filling and emptying the pipeline takes more than a fifth of the time."""

LARGEST_BUBBLE = Fraction(3, 10)
LARGEST_IMBALANCE = Fraction(1, 5)
USUAL_EFFICIENCY = Fraction(9, 10)


def pipeline_warnings(
    schedule: Schedule,
    num_microbatches: int,
    num_stages: int,
    stage_costs: Sequence[int | float | Fraction] = (),
    *,
    remedy: str = "move layers away from it, or use fewer stages",
) -> list[str]:
    """Return what is worth changing, one sentence each.

    Args:
        schedule: the schedule.
        num_microbatches: M.
        num_stages: S.
        stage_costs: FLOPs (or time) of each stage, in any unit; empty if unknown.
        remedy: what helps against unequal stages.
    """
    found = [
        _too_few(schedule, num_microbatches, num_stages),
        _large_bubble(schedule, num_microbatches, num_stages),
        _imbalance(stage_costs, remedy),
    ]
    return [text for text in found if text]


def imbalance(stage_costs: Sequence[int | float | Fraction]) -> Fraction:
    """Return by how much the slowest stage exceeds the mean."""
    costs = [Fraction(cost) for cost in stage_costs]
    mean = sum(costs, Fraction(0)) / len(costs)
    return max(costs) / mean - 1 if mean else Fraction(0)


def _too_few(schedule: Schedule, count: int, stages: int) -> str:
    enough = MICROBATCHES_PER_STAGE * stages
    if stages == 1 or count >= enough:
        return ""
    now, then = (_percent(schedule.efficiency(n, stages)) for n in (count, enough))
    return (
        f"{count} microbatches are few for {stages} stages: efficiency {now}; "
        f"pipeline.num_microbatches={enough} gives {then}"
    )


def _large_bubble(schedule: Schedule, count: int, stages: int) -> str:
    bubble = schedule.bubble(count, stages)
    if bubble <= LARGEST_BUBBLE:
        return ""
    needed = schedule.microbatches_for(USUAL_EFFICIENCY, stages)
    needed = -(-needed // stages) * stages if schedule.num_chunks > 1 else needed
    other = "" if schedule.splits_backward else ", or pipeline.schedule=zb_h1 a smaller bubble"
    return (
        f"stages wait {_percent(bubble)} of the time; pipeline.num_microbatches={needed} "
        f"gives an efficiency of {_percent(schedule.efficiency(needed, stages))}{other}"
    )


def _imbalance(stage_costs: Sequence[int | float | Fraction], remedy: str) -> str:
    if not stage_costs or (excess := imbalance(stage_costs)) <= LARGEST_IMBALANCE:
        return ""
    total = sum(Fraction(cost) for cost in stage_costs)
    shares = ", ".join(_percent(Fraction(cost) / total) for cost in stage_costs)
    slowest = max(range(len(stage_costs)), key=lambda stage: stage_costs[stage])
    return (
        f"stage {slowest} has {_percent(excess)} more work than the mean, and all others wait for "
        f"it ({shares}); {remedy}"
    )


def _percent(share: Fraction) -> str:
    return f"{float(share) * 100:.0f}%"
