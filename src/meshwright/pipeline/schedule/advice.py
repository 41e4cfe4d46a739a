"""Warnings about pipelines that wait too much, with the numbers and the better setting."""

from collections.abc import Sequence
from fractions import Fraction

from meshwright.config.microbatches import MICROBATCHES_PER_STAGE, multiples_around
from meshwright.errors import Setting
from meshwright.pipeline.schedule.operations import Times
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.text.units import either

LARGEST_BUBBLE = Fraction(3, 10)
LARGEST_IMBALANCE = Fraction(1, 5)
SMALLEST_DIFFERENCE = Fraction(1, 100)
USUAL_EFFICIENCY = Fraction(9, 10)

Costs = Sequence[int | float | Fraction]
"""FLOPs or time of each stage, in any unit."""


def pipeline_warnings(
    schedule: Schedule,
    num_microbatches: int,
    num_stages: int,
    stage_costs: Costs = (),
    *,
    bubble: Fraction | None = None,
    samples: int = 0,
    replicas: int = 1,
    remedy: str = "move layers away from it, or use fewer stages",
) -> list[str]:
    """Return suggested changes, one sentence each.

    The bubble of these costs is simulated by default; with ``samples``, batch sizes are named.
    """
    equal = schedule.bubble(num_microbatches, num_stages)
    if bubble is None:
        bubble = bubble_with(schedule, num_microbatches, num_stages, stage_costs)
    uneven = _is_uneven(stage_costs, equal, bubble)
    warnings: list[str] = []
    if num_stages > 1 and num_microbatches < MICROBATCHES_PER_STAGE * num_stages:
        warnings.append(_too_few(schedule, num_microbatches, num_stages, samples, replicas))
    # Where only unequal stages make stages wait, the last warning says so.
    if equal > LARGEST_BUBBLE or (bubble > LARGEST_BUBBLE and not uneven):
        warnings.append(_large_bubble(schedule, bubble, num_stages, samples, replicas))
    if uneven:
        warnings.append(_imbalance(stage_costs, equal, bubble, remedy))
    return warnings


def bubble_with(
    schedule: Schedule, num_microbatches: int, num_stages: int, stage_costs: Costs
) -> Fraction:
    """Return the share of time stages wait in lockstep, each as slow as its cost says."""
    if not any(stage_costs):
        return schedule.bubble(num_microbatches, num_stages)
    return schedule.table(num_microbatches, num_stages).timeline(Times.of_costs(stage_costs)).bubble


def imbalance(stage_costs: Costs) -> Fraction:
    """Return by how much the slowest stage exceeds the mean."""
    return max(Times.of_costs(stage_costs).scale, default=1) - Fraction(1)


def _too_few(schedule: Schedule, count: int, stages: int, samples: int, replicas: int) -> str:
    enough = MICROBATCHES_PER_STAGE * stages
    now, then = (float(schedule.efficiency(n, stages)) for n in (count, enough))
    few = "1 microbatch is" if count == 1 else f"{count} microbatches are"
    return (
        f"{few} few for {stages} stages: efficiency {now:.0%}; "
        f"{_setting(enough, samples, replicas)} gives {then:.0%}"
    )


def _large_bubble(
    schedule: Schedule, bubble: Fraction, stages: int, samples: int, replicas: int
) -> str:
    needed = schedule.microbatches_for(USUAL_EFFICIENCY, stages)
    needed = -(-needed // stages) * stages if schedule.num_chunks > 1 else needed
    smaller = f", or {Setting('pipeline.schedule', 'zb_h1')} a smaller bubble"
    other = "" if schedule.splits_backward else smaller
    return (
        f"stages wait {float(bubble):.0%} of the time; {_setting(needed, samples, replicas)} "
        f"gives an efficiency of {float(schedule.efficiency(needed, stages)):.0%} if they have "
        f"equal work{other}"
    )


def _setting(count: int, samples: int, replicas: int) -> str:
    """Return the setting for this many microbatches, with the nearest batch sizes if needed."""
    setting, by = Setting("pipeline.num_microbatches", count), count * replicas
    if samples % by == 0:
        return str(setting)
    return f"{setting} with a global batch of {either(multiples_around(samples, by))} samples"


def _is_uneven(stage_costs: Costs, equal: Fraction, bubble: Fraction) -> bool:
    """Whether stages wait because their work is unequal."""
    if not stage_costs or imbalance(stage_costs) <= LARGEST_IMBALANCE:
        return False
    # One microbatch at a time passes every stage anyway, however slow.
    return bubble - equal >= SMALLEST_DIFFERENCE


def _imbalance(stage_costs: Costs, equal: Fraction, bubble: Fraction, remedy: str) -> str:
    excess = imbalance(stage_costs)
    total = sum(Fraction(cost) for cost in stage_costs)
    shares = ", ".join(f"{float(Fraction(cost) / total):.0%}" for cost in stage_costs)
    slowest = max(range(len(stage_costs)), key=lambda stage: stage_costs[stage])
    return (
        f"stage {slowest} has {float(excess):.0%} more work than the mean (shares of the work: "
        f"{shares}), so stages wait {float(bubble):.0%} of the time instead of {float(equal):.0%}; "
        f"{remedy}"
    )
