"""The HTML page about plans: sentences, tables and drawings, without scripts."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from meshwright.mesh.axes import describe_sizes
from meshwright.mesh.build import abstract_mesh
from meshwright.mesh.svg_drawing import mesh_svg
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
    summary,
    unit_of_speed,
)
from meshwright.planner.search.what_if import ScalingPoint
from meshwright.runtime.versions import own_version
from meshwright.text.units import counted, human_bytes, human_count, human_seconds

_ASSETS = Path(__file__).parent / "assets"
_TILES = ("parameters", "global batch", "step", "MFU", "memory", "communication")
_NO_COLUMNS = ("idle", "communication")
"""Left out of the table of plans: the drawing of their times shows it."""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def plan_page(report: PlanReport) -> str:
    """Return a page about plans that loads nothing from elsewhere."""
    title = f"{report.name} on {report.result.task.hardware}"
    limit = report.result.task.memory_share
    drawing = mesh_svg(abstract_mesh(report.best.plan.mesh or {"data": 1}))
    sections = (
        ("Decision", _decision(report)),
        ("Plans", _table(in_columns(row, _NO_COLUMNS) for row in plan_rows(report))),
        ("Memory of a device", _memory(report.result.plans, limit)),
        ("Time of a step", _times(report.result.plans)),
        ("Mesh", f'<div class="plan-drawing">{drawing}</div>'),
        ("Scaling", _scaling(report)),
        ("Budget", _list([str(report.budget)] if report.budget else [])),
        ("What would change the decision", _list(change_lines(report.changes))),
        ("Rejected meshes", _rejected(report)),
    )
    files = (_ASSETS / "style.css", _ASSETS / "plan.css")
    style = "".join(file.read_text(encoding="utf-8") for file in files)
    body = "\n".join(f"<section><h2>{name}</h2>{text}</section>" for name, text in sections if text)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{_escape(title)} · Meshwright</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<div id="page">
<header><h1>{_escape(title)}<span>{_escape(describe_sizes(report.best.plan.mesh))}</span></h1></header>
{body}
<footer>Meshwright {_escape(own_version())}</footer>
</div>
</body>
</html>
"""


def _decision(report: PlanReport) -> str:
    best = report.best
    tiles = in_columns((*summary(report), *plan_rows(report)[0]))
    shown = "".join(
        f"<div><dt>{_escape(name)}</dt><dd>{_escape(tiles[name])}</dd></div>" for name in _TILES
    )
    words = ": ".join(filter(None, (describe_sizes(best.plan.mesh), kind_of_mesh(best.plan.mesh))))
    kind = f"<p>{_escape(words)}</p>"
    lines = [*report.conclusions, *map(str, report.mistakes), *report.comparison, *report.remarks]
    return f'{kind}<dl class="tiles">{shown}</dl>{_list(lines)}'


def _memory(plans: Sequence[Estimate], share: float) -> str:
    rows = [
        _bar(
            describe_sizes(each.plan.mesh),
            memory_parts(each.memory),
            max(each.capacity, each.memory.total),
            human_bytes(each.memory.total),
            human_bytes,
            mark=share,
        )
        for each in plans
    ]
    note = _note(f"the line is {share:.0%} of a device")
    note += _note(memory_note(plans[0].memory))
    return _legend(list(memory_parts(plans[0].memory))) + "".join(rows) + note


def _note(text: str) -> str:
    return f'<p class="note">{_escape(f"{text[:1].upper()}{text[1:]}.")}</p>' if text else ""


def _times(plans: Sequence[Estimate]) -> str:
    names = list(dict.fromkeys(name for each in plans for name in time_parts(each)))
    slowest = max(each.time.step for each in plans)
    rows = [
        _bar(
            describe_sizes(each.plan.mesh),
            {name: time_parts(each).get(name, 0.0) for name in names},
            slowest,
            human_seconds(each.time.step),
            human_seconds,
        )
        for each in plans
    ]
    return (
        _legend(names)
        + "".join(rows)
        + _note(SENT if any(each.time.exposed for each in plans) else "")
    )


def _bar(
    name: str,
    parts: Mapping[str, float],
    whole: float,
    total: str,
    show: Callable[[float], str],
    *,
    mark: float | None = None,
) -> str:
    pieces = "".join(
        f'<span class="c{number}" style="width:{100 * size / whole:.3f}%" '
        f'title="{_escape(f"{part}: {show(size)}")}"></span>'
        for number, (part, size) in enumerate(parts.items())
    )
    line = "" if mark is None else f'<i style="left:{100 * mark:.2f}%"></i>'
    return (
        f'<div class="plan-row"><b>{_escape(name)}</b>'
        f'<div class="plan-bar">{pieces}{line}</div><span>{_escape(total)}</span></div>'
    )


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><span class="swatch c{number}"></span>{_escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul><p></p>'


def _scaling(report: PlanReport) -> str:
    table = _table(in_columns(row) for row in scaling_rows(report))
    curve = _curve([point for point in report.points if point.estimate], unit_of_speed(report))
    return curve + table + _note(scaling_note(report.points))


def _curve(points: Sequence[ScalingPoint], unit: str) -> str:
    """Return speed by devices as a drawing, with linear scaling as a dashed line."""
    if len(points) < 2:
        return ""
    width, height, left, foot = 720.0, 280.0, 70.0, 40.0
    devices, base = points[-1].num_devices, points[0]
    ideal = base.tokens_per_second / base.num_devices * devices
    top = max(ideal, *(point.tokens_per_second for point in points)) * 1.05

    def place(count: float, speed: float) -> tuple[float, float]:
        x = left + (width - left - 20) * count / devices
        return round(x, 1), round((height - foot) * (1 - speed / top) + 8, 1)

    places = [place(point.num_devices, point.tokens_per_second) for point in points]
    path = "M" + " L".join(f"{x},{y}" for x, y in places)
    start, end = place(0, 0), place(devices, ideal)
    marks = "".join(
        f'<circle cx="{x}" cy="{y}" r="4"><title>'
        + _escape(
            f"{counted(point.num_devices, 'device')}: {human_count(point.tokens_per_second)} "
            f"{unit}, {point.efficiency:.0%} per device"
        )
        + f'</title></circle><text x="{x}" y="{height - 12}" text-anchor="middle">'
        f"{point.num_devices}</text>"
        for (x, y), point in zip(places, points, strict=True)
        if point.num_devices >= devices / 12
    )
    return (
        f'<svg class="plan-curve" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{unit} by devices">'
        f'<path class="ideal" d="M{start[0]},{start[1]} L{end[0]},{end[1]}"/>'
        f'<path d="{path}"/>{marks}'
        f'<text x="4" y="{places[-1][1] + 4}">{_escape(human_count(points[-1].tokens_per_second))}'
        f"</text></svg>"
        f'<p class="note">{unit} by number of devices; dashed: linear scaling.</p>'
    )


def _rejected(report: PlanReport) -> str:
    rows = [
        {"mesh": describe_sizes(each.mesh), "reason": each.reason}
        for each in report.result.rejected
    ]
    count = counted(len(rows), "mesh")
    return f"<details><summary>{count}</summary>{_table(rows)}</details>" if rows else ""


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(rows: Iterable[Mapping[str, str]]) -> str:
    """Return rows of cells by the names of their columns."""
    first, *others = rows
    names = "".join(f"<th>{_escape(name)}</th>" for name in first)
    body = "".join(
        "<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row.values()) + "</tr>"
        for row in (first, *others)
    )
    return f'<table class="plan-table"><tr>{names}</tr>{body}</table>'


def _escape(text: str) -> str:
    # File names may contain bytes that are not text.
    return html.escape(text.encode(errors="replace").decode())
