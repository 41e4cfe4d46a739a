"""The plan that `mesh=auto` chooses, in one line with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.hardware import Hardware
from meshwright.plan import Plan
from meshwright.planner.devices.capacity import known_hardware
from meshwright.planner.devices.local_hardware import measure_local
from meshwright.planner.estimate.estimate import MARGIN_WORDS
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.estimate.words import microbatches_of, short_plan
from meshwright.planner.guidance.nothing_fits import nothing_fits
from meshwright.planner.guidance.why_this_plan import alone, reason_for
from meshwright.planner.search.candidates import PlanTask
from meshwright.planner.search.search import search
from meshwright.text.units import human_bytes, human_seconds

AUTO = "auto"
"""The value of settings that are left to the planner."""


def hardware_of(devices: Sequence[Any]) -> Hardware:
    """Return the hardware of these devices, from the table or measured."""
    return known_hardware(devices) or measure_local(devices)


def choose_plan(estimator: Estimator, task: PlanTask, setting: str) -> tuple[Plan, str]:
    """Return the best plan, and a line that says what was chosen and why.

    Args:
        estimator: estimates plans for the model.
        task: the devices, the batch and what the user has set.
        setting: what the user wrote to ask for it.
    """
    result = search(estimator, task, top=3)
    if not result.plans:
        raise nothing_fits(estimator, result)
    best = result.best
    fits = alone(estimator, task).fits(task.memory_share)
    plan = best.plan
    # Tables leave out the usual number of microbatches; here the user left it to the planner.
    usual = [microbatches_of(plan)] if plan.batch.gradient_accumulation_steps == 1 else []
    chosen = ", ".join([short_plan(plan), *usual])
    margin = f" ({MARGIN_WORDS})" if best.memory.reserved else ""
    line = (
        f"{setting}: {chosen}; {reason_for(result, best, fits_alone=fits)}; "
        f"{human_seconds(best.time.step)} per update and "
        f"{human_bytes(best.memory.total)} per device{margin}, estimated for {task.hardware}"
    )
    return plan, line
