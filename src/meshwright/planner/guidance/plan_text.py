"""A report about plans for the terminal: sentences, tables and bars."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.estimate.words import kind_of_mesh, memory_parts, time_parts
from meshwright.planner.guidance.plan_report import PlanReport
from meshwright.planner.guidance.plan_rows import (
    SENT,
    change_lines,
    in_columns,
    memory_note,
    plan_rows,
    scaling_note,
    scaling_rows,
    unit_of_speed,
)
from meshwright.text.columns import Columns, Indented
from meshwright.text.units import counted, human_bytes, human_seconds

BAR = 48
"""Columns of a full bar."""
SHADES = "█▓▒░▞▚▤▥"


def report_text(report: PlanReport) -> RenderableType:
    """Return a report for reading."""
    parts: list[RenderableType] = [*_head(report)]
    for title, lines in (
        ("why", [Indented(line, 2) for line in report.decision]),
        ("watch out", [Indented(str(each), 2) for each in report.mistakes]),
        ("compared", [Indented(line, 2) for line in report.comparison]),
        ("plans", [_table(report)]),
        ("memory of a device", list(_memory(report.best, report.result.task.memory_share))),
        ("time of a step", list(_time(report.best))),
        (
            "scaling, for the same global batch",
            [_scaling(report), *_note(scaling_note(report.points))],
        ),
        ("budget", [Indented(str(report.budget), 2)] if report.budget else []),
        (
            "what would change the decision",
            [Indented(line, 2) for line in change_lines(report.changes)],
        ),
        ("rejected", list(_rejected(report))),
    ):
        if lines:
            parts += [Text(), Text(title, "bold"), *lines]
    return Group(*parts)


def _head(report: PlanReport) -> Iterator[RenderableType]:
    task, best = report.result.task, report.best
    samples = counted(task.global_batch_size, "sample")
    tokens = task.global_batch_size * report.tokens_per_sample
    size = f"{samples} ({tokens:,} tokens)" if report.tokens_per_sample > 1 else samples
    yield Text(
        f"{report.name}, {report.num_parameters:,} parameters, on {task.hardware}; {size} per step"
    )
    kind = f" ({kind_of_mesh(best.plan.mesh)})" if best.plan.mesh else ""
    shown, unit = in_columns(plan_rows(report)[0]), unit_of_speed(report)
    yield Text.assemble(
        (shown["mesh"], "bold green"),
        f"{kind}: {shown['step']} per step, {shown[unit]} {unit}, MFU {shown['MFU']}, "
        f"{shown['memory']} of {human_bytes(best.capacity)} per device",
    )
    yield Text(best.plan.describe())
    if report.fewer:
        yield Indented(report.fewer, 2, style="bold yellow", first=0)
    yield from (Text(f"remark: {remark}") for remark in report.remarks)


def _table(report: PlanReport) -> Columns:
    rows = [in_columns(row, ("communication", "why")) for row in plan_rows(report)]
    cells = [
        [
            Text(cell, "bold") if (title, number) == ("mesh", 0) else cell
            for title, cell in row.items()
        ]
        for number, row in enumerate(rows)
    ]
    head = tuple(rows[0])
    return Columns(head, cells, right=head[3:], notes=report.reasons)


def _memory(best: Estimate, share: float) -> Iterator[RenderableType]:
    parts = {name: size for name, size in memory_parts(best.memory).items() if size}
    limit = share * best.capacity
    bar = Text("  ")
    for shade, size in zip(SHADES, parts.values(), strict=False):
        bar.append(shade * round(BAR * size / best.capacity))
    bar.append("·" * max(0, BAR + 2 - len(bar)))
    bar.append(f"  {best.share:.0%} of {human_bytes(best.capacity)}")
    yield bar
    for shade, (name, size) in zip(SHADES, parts.items(), strict=False):
        yield Text(f"  {shade} {name:<12} {human_bytes(size):>9}")
    yield Text(f"    {'free':<12} {human_bytes(limit - best.memory.total):>9} to the limit")
    yield from _note(memory_note(best.memory))


def _note(text: str) -> list[RenderableType]:
    return [Indented(text, 4, first=2)] if text else []


def _time(best: Estimate) -> Iterator[RenderableType]:
    parts = time_parts(best)
    width = max(map(len, parts))
    for name, seconds in parts.items():
        if seconds > 0:
            share = seconds / best.time.step
            bar = "█" * max(1, round(BAR * share))
            yield Text(f"  {name:<{width}} {human_seconds(seconds):>8} {share:>4.0%} {bar}")
    if best.time.exposed:
        yield from _note(SENT)


def _scaling(report: PlanReport) -> Columns:
    fastest = max(point.tokens_per_second for point in report.points)
    bars = [
        "█" * max(1, round(BAR / 2 * point.tokens_per_second / fastest)) if point.estimate else ""
        for point in report.points
    ]
    rows = [in_columns(row) for row in scaling_rows(report)]
    head = tuple(rows[0])
    cells = [(*row.values(), bar) for row, bar in zip(rows, bars, strict=True)]
    return Columns((*head, ""), cells, right=("devices", *head[2:]))


_KINDS = {
    "memory": ("does not fit", "do not fit"),
    "slower": ("is slower or less simple", "are slower or less simple"),
    "topology": ("crosses nodes", "cross nodes"),
    "division": ("cannot divide the layers",) * 2,
    "blocks": ("cannot divide the blocks",) * 2,
    "batch": ("cannot divide the batch",) * 2,
}
"""By kind, what is wrong with one mesh, and with several."""


def _rejected(report: PlanReport) -> Iterator[RenderableType]:
    """Yield how many meshes are rejected for what, each with the first of them."""
    for kind, (one, several) in _KINDS.items():
        of_kind = [each for each in report.result.rejected if each.kind == kind]
        if of_kind:
            nearest = min(of_kind, key=lambda each: each.distance)
            if len(of_kind) == 1:
                yield Indented(f"1 mesh {one}: {nearest}", 4, first=2)
            else:
                yield Indented(f"{len(of_kind)} meshes {several}, such as {nearest}", 4, first=2)
