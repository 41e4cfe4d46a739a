"""The plans for a model, searched and explained: the whole report, or the best one in a line."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import yaml

from meshwright.plan import MADE_FOR, Plan
from meshwright.planner.estimate.estimate import MARGIN_WORDS, Estimate
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.estimate.words import compare_plans, microbatches_of, short_plan, too_large
from meshwright.planner.guidance.anti_patterns import (
    OF_MESHES,
    AntiPattern,
    find_anti_patterns,
    linear_scaling,
)
from meshwright.planner.guidance.budget import Budget, PlanGoal
from meshwright.planner.guidance.why_this_plan import (
    alone,
    explain_decision,
    fewer_devices,
    nothing_fits,
    reason_for,
)
from meshwright.planner.search.candidates import PlanTask, all_sizes
from meshwright.planner.search.search import SearchResult, search
from meshwright.planner.search.what_if import ScalingPoint, WhatIf, scaling_curve, what_ifs
from meshwright.text.units import human_bytes, human_seconds

AUTO = "auto"
"""The value of settings that are left to the planner."""


@dataclass(frozen=True)
class PlanReport:
    """What is said about the plans for a model.

    ``reasons`` say why each of the ranked plans ranks where it does, ``mistakes`` are those of the
    recommended one, because the user has set something. ``comparison`` and ``other`` are of the
    plan that was to be compared, ``points`` the best plans for fewer devices, ``changes`` what
    would change the decision. ``fewer`` says that fewer devices are as fast, and how to plan for
    them.
    """

    name: str
    num_parameters: int
    tokens_per_sample: int
    result: SearchResult
    reasons: list[str]
    decision: list[str]
    mistakes: list[AntiPattern]
    comparison: list[str]
    other: Estimate | None
    points: list[ScalingPoint]
    changes: list[WhatIf]
    budget: Budget | None = None
    fewer: str = ""
    remarks: Sequence[str] = ()

    @property
    def best(self) -> Estimate:
        """The recommended plan."""
        return self.result.best

    @property
    def conclusions(self) -> list[str]:
        """The decision in words, after the note that fewer devices are as fast, if there is one."""
        return [*filter(None, [self.fewer]), *self.decision]

    def to_yaml(self, settings: Sequence[str] = ()) -> str:
        """Return the plan as a file that the setting `plan` reads, with the model's settings."""
        best = self.best
        head = (
            f"# {self.name} on {best.hardware}: {human_seconds(best.time.step)} per step and "
            f"{human_bytes(best.memory.total)} per device, estimated.\n"
            "# Train with it: meshwright train … plan=THIS_FILE\n"
        )
        made_for: dict[str, Any] = {
            "model": self.name,
            "parameters": self.num_parameters,
            "hardware": str(best.hardware),
        }
        known = {MADE_FOR: made_for | ({"settings": list(settings)} if settings else {})}
        return head + best.plan.to_yaml() + yaml.safe_dump(known, sort_keys=False)


def make_report(
    estimator: Estimator,
    task: PlanTask,
    *,
    name: str,
    top: int = 5,
    other: PlanTask | None = None,
    goal: PlanGoal | None = None,
    remarks: Sequence[str] = (),
) -> PlanReport:
    """Search for the best plan and explain it; ``remarks`` say what was assumed."""
    tokens = estimator.tokens_per_sample
    if goal is not None:
        # A goal that cannot be counted in steps is refused before the search.
        goal.samples(1, tokens)
    result = search(estimator, task, top=top)
    if not result.plans:
        raise nothing_fits(estimator, result)
    best = result.best
    compared = None if other is None else _compared(estimator, other)
    points = scaling_curve(estimator, task, best)
    fits_alone = alone(estimator, task).fits(task.memory_share)
    linear = linear_scaling(points)
    mistakes = find_anti_patterns(estimator, best, None, task.memory_share)
    if not task.fixed.mesh:
        mistakes = [each for each in mistakes if each.name not in OF_MESHES]
    meshes = list(islice(all_sizes(task.hardware.count, task.fixed.mesh), 2))
    return PlanReport(
        name=name,
        num_parameters=estimator.num_parameters,
        tokens_per_sample=tokens,
        result=result,
        reasons=[
            reason_for(estimator, result, each, fits_alone=fits_alone) for each in result.plans
        ],
        decision=explain_decision(estimator, result),
        mistakes=[*mistakes, *([linear] if linear else [])],
        comparison=[] if compared is None else _comparison(estimator, best, compared, task),
        other=compared,
        points=points,
        changes=what_ifs(estimator, result) if len(meshes) > 1 else [],
        budget=None if goal is None else goal.budget(best, tokens),
        fewer=fewer_devices(task, best, points),
        remarks=remarks,
    )


def _compared(estimator: Estimator, task: PlanTask) -> Estimate:
    """Return the best plan of the other task, even if it does not fit."""
    result = search(estimator, task, top=1)
    return result.best if result.plans else result.too_large()[0]


def _comparison(estimator: Estimator, best: Estimate, other: Estimate, task: PlanTask) -> list[str]:
    mistakes = find_anti_patterns(estimator, other, best, task.memory_share)
    lines = (
        [compare_plans(best, other)]
        if other.fits(task.memory_share)
        else [f"{other.plan.describe()} {too_large(other, task.memory_share)}."]
    )
    return [*lines, *map(str, mistakes)]


def choose_plan(estimator: Estimator, task: PlanTask, setting: str) -> tuple[Plan, str]:
    """Return the best plan, and a line that says what was chosen and why."""
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
        f"{setting}: {chosen}; {reason_for(estimator, result, best, fits_alone=fits)}; "
        f"{human_seconds(best.time.step)} per step and "
        f"{human_bytes(best.memory.total)} per device{margin}, estimated for {task.hardware}"
    )
    return plan, line
