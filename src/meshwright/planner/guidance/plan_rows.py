"""What is said about plans, row by row: the terminal, the page and JSON show the same rows."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from meshwright.mesh.axes import describe_sizes
from meshwright.planner.estimate.estimate import MARGIN_WORDS, Estimate, MemoryEstimate
from meshwright.planner.estimate.words import memory_parts, settings_of, time_parts
from meshwright.planner.guidance.plan_report import PlanReport
from meshwright.planner.search.what_if import ScalingPoint, WhatIf
from meshwright.text.units import counted, human_bytes, human_count, human_seconds


class Entry(NamedTuple):
    """One thing that is said about a plan: a title and a text to read, a key and a value in JSON.

    Without a title, or a key, it is left out there.
    """

    title: str | None = None
    text: str = ""
    key: str = ""
    value: Any = None


Row = Sequence[Entry]


def in_json(row: Row) -> dict[str, Any]:
    """Return a row as plain values."""
    return {entry.key: entry.value for entry in row if entry.key}


def in_columns(row: Row, leave_out: Collection[str] = ()) -> dict[str, str]:
    """Return a row for reading: texts by title, without some of them."""
    return {
        entry.title: entry.text
        for entry in row
        if entry.title is not None and entry.title not in leave_out
    }


def summary(report: PlanReport) -> Row:
    """Return what was planned."""
    task, size = report.result.task, report.num_parameters
    samples = task.global_batch_size
    return (
        Entry(key="model", value=report.name),
        Entry("parameters", human_count(size), "parameters", size),
        Entry(key="hardware", value=str(task.hardware)),
        Entry(key="devices", value=task.hardware.count),
        Entry("global batch", counted(samples, "sample"), "global_batch_size", samples),
        Entry(key="memory_share", value=task.memory_share),
    )


def plan_rows(report: PlanReport) -> list[Row]:
    """Return the ranked plans, each with the reason for its rank."""
    ranked = zip(report.result.plans, report.reasons, strict=True)
    return [
        (Entry("", str(number)), *_plan(report, each), Entry("why", reason, "reason", reason))
        for number, (each, reason) in enumerate(ranked, 1)
    ]


def unit_of_speed(report: PlanReport) -> str:
    """Return what is counted per second."""
    return "tokens/s" if report.tokens_per_sample > 1 else "samples/s"


def _plan(report: PlanReport, estimate: Estimate) -> Row:
    plan, time, memory = estimate.plan, estimate.time, estimate.memory
    samples = report.result.task.global_batch_size / time.step
    tokens, sent = samples * report.tokens_per_sample, time.exposed / time.step
    sizes = {**memory_parts(memory), "total": memory.total, "capacity": estimate.capacity}
    return (
        Entry("mesh", describe_sizes(plan.mesh), "mesh", plan.mesh),
        Entry("settings", settings_of(plan), "plan", plan.model_dump(mode="json")),
        Entry("step", human_seconds(time.step), "step_time", time.step),
        Entry(unit_of_speed(report), human_count(tokens), "tokens_per_second", tokens),
        Entry("MFU", f"{time.mfu:.0%}", "mfu", time.mfu),
        Entry("memory", human_bytes(memory.total), "memory", sizes),
        Entry("idle", f"{(time.exposed + time.bubble) / time.step:.0%}"),
        Entry("communication", f"{sent:.0%} of the time", "communication_share", sent),
        Entry(key="time", value=time_parts(estimate)),
        Entry(key="sent_bytes", value={axis: t.sent_bytes for axis, t in time.traffic.items()}),
        Entry(key="samples_per_second", value=samples),
    )


def scaling_rows(report: PlanReport) -> list[Row]:
    """Return the best plans for fewer devices, and for all."""
    unit = unit_of_speed(report)
    return [_point(point, unit) for point in report.points]


def _point(point: ScalingPoint, unit: str) -> Row:
    devices = Entry("devices", str(point.num_devices), "devices", point.num_devices)
    if point.estimate is None:
        return (
            devices,
            Entry("mesh", "does not fit", "mesh"),
            Entry("step", key="step_time"),
            Entry(unit, key="tokens_per_second"),
            Entry("per device", key="efficiency"),
        )
    plan, step, speed = point.estimate.plan, point.estimate.time.step, point.tokens_per_second
    return (
        devices,
        Entry("mesh", describe_sizes(plan.mesh), "mesh", plan.mesh),
        Entry("step", human_seconds(step), "step_time", step),
        Entry(unit, human_count(speed), "tokens_per_second", speed),
        Entry("per device", f"{point.efficiency:.0%}", "efficiency", point.efficiency),
    )


def report_json(report: PlanReport) -> dict[str, Any]:
    """Return a report as plain values."""

    def every(rows: Iterable[Row]) -> list[dict[str, Any]]:
        return [in_json(row) for row in rows]

    other = report.other
    return {
        **in_json(summary(report)),
        "plans": every(plan_rows(report)),
        "rejected": [each.to_json() for each in report.result.rejected],
        "decision": report.conclusions,
        "mistakes": [{"name": each.name, "text": each.text} for each in report.mistakes],
        "comparison": report.comparison,
        "compared": None if other is None else {**in_json(_plan(report, other)), "reason": ""},
        "scaling": every(scaling_rows(report)),
        "budget": report.budget and report.budget.to_json(),
        "what_if": [each.to_json() for each in report.changes],
        "remarks": list(report.remarks),
    }


SENT = "communication is what is sent over an axis of the mesh while nothing is computed"


def memory_note(memory: MemoryEstimate) -> str:
    """Explain a margin, or why fewer gradients are counted than there are; empty if neither."""
    if memory.reserved:
        return MARGIN_WORDS
    if memory.gradients >= 0.99 * memory.all_gradients:
        return ""
    size = human_bytes(memory.all_gradients)
    missing = f"of {size} of gradients, the others" if memory.gradients else f"{size} of gradients"
    return f"{missing} follow this peak, in memory that activations no longer need"


def scaling_note(points: Sequence[ScalingPoint]) -> str:
    """Say why devices are faster together than one by one; empty if they are not."""
    known = [point for point in points if point.estimate is not None]
    best = max(known, key=lambda point: point.efficiency, default=None)
    if best is None or best.estimate is None or round(100 * best.efficiency) <= 100:
        return ""
    first = known[0]
    assert first.estimate is not None
    return f"more than 100% per device: {_faster_together(first.estimate, best.estimate)}"


def _faster_together(few: Estimate, many: Estimate) -> str:
    """Return what a device saves if there are more of them."""
    one, other = (counted(each.plan.num_devices, "device") for each in (few, many))
    own, better = settings_of(few.plan), settings_of(many.plan)
    if own and own != better:
        runs = "runs" if few.plan.num_devices == 1 else "run"
        return f"{one} {runs} {own}; {other} have the memory for {better or 'a step without that'}"
    return f"each of {other} holds and updates a smaller part of the training state"


def change_lines(changes: Sequence[WhatIf]) -> list[str]:
    """Return what would change the decision; one sentence if nothing that was tried does."""
    if not changes or any(each.after is not None or each.found is None for each in changes):
        return list(map(str, changes))
    mesh, tried = changes[0].before.plan.mesh, " or ".join(each.change for each in changes)
    return [f"nothing that was tried: still {describe_sizes(mesh)} with {tried}"]
