"""Drawing a timeline in the terminal: stages down, time across."""

from __future__ import annotations

import math
from fractions import Fraction

from rich.console import Group
from rich.style import Style
from rich.text import Text

from meshwright.pipeline.operations import Kind, Op
from meshwright.pipeline.timeline import Timeline

COLOURS = {
    Kind.FORWARD: "#6aa5ff",
    Kind.BACKWARD: "#7fcf8f",
    Kind.INPUT_GRAD: "#7fcf8f",
    Kind.WEIGHT_GRAD: "#f5b95f",
}
"""Fills of operations; the second half of a stage's chunks is drawn darker."""

BUBBLE = "#8a8f98"
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
}
_INK = "#10131a"


def render_timeline(timeline: Timeline, width: int = 100) -> Group:
    """Return a drawing of a timeline; what does not fit into ``width`` columns is cut off."""
    unit = time_unit(timeline)
    columns = int(timeline.makespan / unit)
    label = len(f"stage {timeline.shape.num_stages - 1} ")
    room = max(1, width - label)
    per_unit = 3 if columns * 3 <= room else 2 if columns * 2 <= room else 1
    shown = min(columns, room // per_unit)
    rows = [
        _row(timeline, stage, unit, per_unit, shown) for stage in range(timeline.shape.num_stages)
    ]
    cut = [] if shown == columns else [Text(f"… {columns - shown} of {columns} columns not shown")]
    return Group(*rows, *cut, _legend(timeline))


def time_unit(timeline: Timeline) -> Fraction:
    """Return the largest time of which every start and end is a multiple."""
    points = [point for span in timeline.spans for point in (span.start, span.end)]
    below = math.lcm(*(point.denominator for point in points))
    above = math.gcd(*(int(point * below) for point in points))
    return Fraction(above, below)


def kinds_of(timeline: Timeline) -> list[Kind]:
    """Return which kinds of operation occur."""
    found = {span.op.kind for span in timeline.spans}
    return [kind for kind in Kind if kind in found]


def shade(op: Op, num_chunks: int) -> str:
    """Return an operation's colour: later chunks are darker."""
    colour = COLOURS[op.kind]
    factor = 1 - 0.22 * op.chunk / max(1, num_chunks - 1) if num_chunks > 1 else 1.0
    parts = (int(int(colour[i : i + 2], 16) * factor) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _row(timeline: Timeline, stage: int, unit: Fraction, per_unit: int, shown: int) -> Text:
    text = Text(f"stage {stage} ".rjust(len(f"stage {timeline.shape.num_stages - 1} ")))
    limit = shown * per_unit
    drawn = 0
    for span in timeline.of_stage(stage):
        start, end = (int(point / unit) * per_unit for point in (span.start, span.end))
        start, end = min(start, limit), min(end, limit)
        text.append("·" * (start - drawn), Style(color=BUBBLE))
        fill = shade(span.op, timeline.shape.num_chunks)
        text.append(_cell(span.op, end - start), Style(color=_INK, bgcolor=fill))
        drawn = max(drawn, end)
    text.append("·" * (limit - drawn), Style(color=BUBBLE))
    return text


def _cell(op: Op, width: int) -> str:
    labels = (f"{op.kind.value}{op.microbatch}", str(op.microbatch), "")
    return next(label for label in labels if not label or len(label) < max(width, 2)).ljust(width)


def _legend(timeline: Timeline) -> Text:
    parts: list[tuple[str, Style] | str] = []
    for kind in kinds_of(timeline):
        parts += [("  ", Style(bgcolor=COLOURS[kind])), f" {NAMES[kind]}  "]
    bubble = f"{float(timeline.bubble) * 100:.1f}%"
    return Text.assemble(*parts, ("··", Style(color=BUBBLE)), f" waiting ({bubble}, simulated)")
