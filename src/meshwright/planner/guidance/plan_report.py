"""Everything that is said about the plans for a model: as text, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ExitCode, UserError
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.estimate.words import compare_plans, memory_parts, time_parts, too_large
from meshwright.planner.guidance.anti_patterns import (
    AntiPattern,
    find_anti_patterns,
    linear_scaling,
)
from meshwright.planner.guidance.budget import Budget, Goal, make_budget
from meshwright.planner.guidance.why_this_plan import (
    alone,
    explain_decision,
    fewer_devices,
    reason_for,
)
from meshwright.planner.search.candidates import PlanTask
from meshwright.planner.search.scaling import ScalingPoint, scaling_curve
from meshwright.planner.search.search import SearchResult, search
from meshwright.planner.search.smallest import smallest_cluster
from meshwright.planner.search.what_if import WhatIf, what_ifs
from meshwright.units import counted, human_bytes


class NothingFits(UserError):
    """No plan fits into the memory of the devices.

    Attributes:
        report: every mesh with its reason, and the smallest cluster, as plain values.
    """

    exit_code = ExitCode.NOTHING_FITS

    def __init__(self, what: str, *, why: str, fix: str, report: dict[str, Any]) -> None:
        self.report = report
        super().__init__(what, why=why, fix=fix)


@dataclass(frozen=True)
class PlanGoal:
    """How much is to be trained, and at which price.

    Attributes:
        goal: how much.
        num_samples: samples of the data; None if unknown.
        usd_per_device_hour: the price of a device; None if unknown.
    """

    goal: Goal
    num_samples: int | None = None
    usd_per_device_hour: float | None = None

    def budget(self, estimator: Estimator, best: Estimate) -> Budget:
        """Return what it costs with a plan."""
        tokens = estimator.tokens_per_sample
        return make_budget(
            self.goal,
            seconds_per_update=best.time.step,
            samples_per_update=best.plan.batch.global_batch_size,
            devices=best.hardware.count,
            tokens_per_sample=tokens if tokens > 1 else None,
            num_samples=self.num_samples,
            usd_per_device_hour=self.usd_per_device_hour,
        )


@dataclass(frozen=True)
class PlanReport:
    """What is said about the plans for a model.

    Attributes:
        name: the model.
        num_parameters: its parameters.
        tokens_per_sample: tokens of a sample; 1 for data other than tokens.
        result: the ranked and the rejected meshes.
        reasons: why each of the ranked plans ranks where it does.
        decision: the recommended plan in words.
        mistakes: common mistakes that it makes, because the user has set something.
        comparison: how another plan compares, in words; empty if none was asked for.
        other: the other plan.
        points: the best plans for fewer devices.
        changes: what would change the decision.
        budget: what training costs; None if it is not known how much.
        fewer: that fewer devices are as fast, and how to plan for them; empty if they are not.
        remarks: what was assumed.
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
        """The decision in words, after what argues against all of the devices."""
        return [*filter(None, [self.fewer]), *self.decision]


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
    """Search for the best plan and explain it.

    Args:
        estimator: estimates plans for the model.
        task: the hardware, the batch and what the user has set.
        name: the model.
        top: how many plans to rank.
        other: what to compare with.
        goal: how much to train.
        remarks: what was assumed.
    """
    result = search(estimator, task, top=top)
    if not result.plans:
        raise nothing_fits(estimator, result)
    best = result.best
    compared = None if other is None else _compared(estimator, other)
    points = scaling_curve(estimator, task, best)
    fits_alone = alone(estimator, task).fits(task.memory_share)
    linear = linear_scaling(points)
    mistakes = find_anti_patterns(estimator, best, None, task.memory_share)
    return PlanReport(
        name=name,
        num_parameters=estimator.num_parameters,
        tokens_per_sample=estimator.tokens_per_sample,
        result=result,
        reasons=[reason_for(result, each, fits_alone=fits_alone) for each in result.plans],
        decision=explain_decision(estimator, result),
        mistakes=[*mistakes, *([linear] if linear else [])],
        comparison=[] if compared is None else _comparison(estimator, best, compared, task),
        other=compared,
        points=points,
        changes=what_ifs(estimator, result),
        budget=None if goal is None else goal.budget(estimator, best),
        fewer=fewer_devices(task, best, points),
        remarks=remarks,
    )


def _compared(estimator: Estimator, task: PlanTask) -> Estimate:
    """Return the best plan of the other task, also if it does not fit: that is worth knowing."""
    result = search(estimator, task, top=1)
    if result.plans:
        return result.best
    known = [each.estimate for each in result.rejected if each.estimate is not None]
    return min(known, key=lambda estimate: estimate.memory.total)


def _comparison(estimator: Estimator, best: Estimate, other: Estimate, task: PlanTask) -> list[str]:
    mistakes = find_anti_patterns(estimator, other, best, task.memory_share)
    fits = other.fits(task.memory_share)
    lines = (
        [compare_plans(best, other)]
        if fits
        else [f"{other.plan.describe()} {too_large(other, task.memory_share)}."]
    )
    return [*lines, *map(str, mistakes)]


def nothing_fits(estimator: Estimator, result: SearchResult) -> NothingFits:
    """Return the error for a model that no plan holds, with the smallest cluster that does."""
    task = result.task
    large = [each for each in result.rejected if each.kind == "memory" and each.estimate]
    nearest = min(large, key=lambda each: each.estimate.memory.total if each.estimate else 0)
    found = smallest_cluster(estimator, task)
    chip = task.hardware.chip.name
    if found is not None and found.task.hardware.count <= task.hardware.count:
        fix = (
            "the settings of mesh and batch are what does not fit; without those of the mesh, "
            f"{found.task.hardware} holds it: {found.best.plan.describe()}"
        )
    elif found is None:
        fix = f"no cluster of {chip} holds it; choose a chip with more memory"
    else:
        memory = human_bytes(found.best.memory.total)
        fix = (
            f"the smallest cluster of {chip} that holds it is {found.task.hardware}: "
            f"{found.best.plan.describe()}, {memory} per device, {_batch_assumed(found, task)}"
        )
    report = {
        "hardware": str(task.hardware),
        "plans": [],
        "rejected": rejected_json(result),
        "smallest_hardware": found and str(found.task.hardware),
        "smallest_mesh": found and found.best.plan.mesh,
        "smallest_global_batch_size": found and found.task.global_batch_size,
    }
    return NothingFits(
        f"no plan fits on {task.hardware}",
        why=f"the nearest is {nearest}",
        fix=fix,
        report=report,
    )


def _batch_assumed(found: SearchResult, asked: PlanTask) -> str:
    """Say which batch the smallest cluster is for: one that can be divided over its devices."""
    batch = found.task.global_batch_size
    if batch == asked.global_batch_size:
        return f"for the same global batch of {counted(batch, 'sample')}"
    return (
        f"for a global batch of {batch} samples instead of {asked.global_batch_size}, which "
        f"{found.task.hardware.count} devices can divide"
    )


def report_json(report: PlanReport) -> dict[str, Any]:
    """Return a report as plain values."""
    task = report.result.task
    return {
        "model": report.name,
        "parameters": report.num_parameters,
        "hardware": str(task.hardware),
        "devices": task.hardware.count,
        "global_batch_size": task.global_batch_size,
        "memory_share": task.memory_share,
        "plans": [
            _plan_json(report, each, reason)
            for each, reason in zip(report.result.plans, report.reasons, strict=True)
        ],
        "rejected": rejected_json(report.result),
        "decision": report.conclusions,
        "mistakes": [{"name": each.name, "text": each.text} for each in report.mistakes],
        "comparison": report.comparison,
        "compared": report.other and _plan_json(report, report.other, ""),
        "scaling": [_point_json(point) for point in report.points],
        "budget": report.budget and report.budget.to_json(),
        "what_if": [each.to_json() for each in report.changes],
        "remarks": list(report.remarks),
    }


def rejected_json(result: SearchResult) -> list[dict[str, Any]]:
    """Return the rejected meshes as plain values."""
    return [
        {"mesh": each.mesh, "kind": each.kind, "reason": each.reason} for each in result.rejected
    ]


def _plan_json(report: PlanReport, estimate: Estimate, reason: str) -> dict[str, Any]:
    time, samples = estimate.time, report.result.task.global_batch_size
    return {
        "mesh": estimate.plan.mesh,
        "plan": estimate.plan.model_dump(mode="json"),
        "memory": {
            **memory_parts(estimate.memory),
            "total": estimate.memory.total,
            "capacity": estimate.capacity,
        },
        "step_time": time.step,
        "time": time_parts(estimate),
        "sent_bytes": {axis: traffic.sent_bytes for axis, traffic in time.traffic.items()},
        "communication_share": time.exposed / time.step,
        "mfu": time.mfu,
        "samples_per_second": samples / time.step,
        "tokens_per_second": samples * report.tokens_per_sample / time.step,
        "reason": reason,
    }


def _point_json(point: ScalingPoint) -> dict[str, Any]:
    best = point.estimate
    return {
        "devices": point.num_devices,
        "mesh": best.plan.mesh if best else None,
        "step_time": best.time.step if best else None,
        "tokens_per_second": point.tokens_per_second if best else None,
        "efficiency": point.efficiency if best else None,
    }
