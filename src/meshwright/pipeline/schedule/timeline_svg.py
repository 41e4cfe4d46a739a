"""Drawing a timeline as a self-contained SVG: stages down, time across."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from meshwright.pipeline.schedule.operations import Span, Spans
from meshwright.pipeline.schedule.timeline_drawing import (
    BUBBLE,
    COLOURS,
    NAMES,
    kinds_of,
    shade,
    time_unit,
)
from meshwright.text.units import counted

# All lengths are in SVG user units, shown as pixels.
_MARGIN, _LABEL, _HEAD, _FOOT = 24, 62, 34, 40
_ROW, _SPACE = 30, 6
_WIDEST_UNIT, _WIDEST = 26, 1400
_SMALLEST_NUMBERED = 13

_STYLE = """
.mw-pipe text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.mw-pipe .head { font-size: 16px; font-weight: 600; fill: #1f2328; }
.mw-pipe .at { font-size: 12px; fill: #59636e; }
.mw-pipe .number { font-size: 11px; fill: #10131a; text-anchor: middle; }
.mw-pipe .number, .mw-pipe .at { font-variant-numeric: tabular-nums; }
.mw-pipe .wait { fill: #8a8f98; fill-opacity: .22; }
@media (prefers-color-scheme: dark) {
.mw-pipe .head { fill: #f0f6fc; }
.mw-pipe .at { fill: #9198a1; }
}
"""


def timeline_svg(timeline: Spans, title: str = "") -> str:
    """Return an SVG drawing of a timeline; every operation says what it is when pointed at."""
    unit = time_unit(timeline)
    columns = int(timeline.makespan / unit)
    across = min(_WIDEST_UNIT, _WIDEST / columns)
    left = _MARGIN + _LABEL
    width = left + max(columns * across, 420) + _MARGIN
    stages = timeline.shape.num_stages
    height = _MARGIN + _HEAD + stages * (_ROW + _SPACE) + _FOOT
    scale = across / float(unit)
    count = counted(timeline.shape.num_microbatches, "microbatch", "microbatches")
    head = title or f"{counted(stages, 'stage')}, {count}"
    bubble = f"{float(timeline.bubble) * 100:.1f}%"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mw-pipe" role="img" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">',
        f"<title>{escape(head)}</title>",
        f"<desc>Stages down, time across. Stages wait {bubble} of the time, simulated.</desc>",
        f"<style>{_STYLE}</style>",
        f'<text x="{_MARGIN}" y="{_MARGIN + 10}" class="head">{escape(head)}</text>',
        *(line for stage in range(stages) for line in _row(timeline, stage, left, scale)),
        *_legend(timeline, height - _FOOT + 14, f"waiting {bubble}, simulated"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _row(timeline: Spans, stage: int, left: float, scale: float) -> Iterator[str]:
    top = _MARGIN + _HEAD + stage * (_ROW + _SPACE)
    yield f'<text x="{_MARGIN}" y="{top + 20}" class="at">stage {stage}</text>'
    whole = float(timeline.makespan) * scale
    yield f'<rect class="wait" x="{left}" y="{top}" width="{whole:g}" height="{_ROW}" rx="3"/>'
    for span in timeline.of_stage(stage):
        yield _cell(span, timeline, left, top, scale)


def _cell(span: Span, timeline: Spans, left: float, top: float, scale: float) -> str:
    x = left + float(span.start) * scale
    width = float(span.end - span.start) * scale
    chunks = timeline.shape.num_chunks
    chunk = f", chunk {span.op.chunk}" if chunks > 1 else ""
    about = f"{NAMES[span.op.kind]} of microbatch {span.op.microbatch}{chunk}, stage {span.stage}"
    number = (
        f'<text class="number" x="{x + width / 2:g}" y="{top + 19}">{span.op.microbatch}</text>'
        if width >= _SMALLEST_NUMBERED
        else ""
    )
    gap = min(1.5, width / 8)
    return (
        f"<g><title>{escape(about)}</title>"
        f'<rect x="{x + gap / 2:g}" y="{top}" width="{width - gap:g}" height="{_ROW}" rx="3" '
        f'fill="{shade(span.op, chunks)}"/>{number}</g>'
    )


def _legend(timeline: Spans, top: float, waiting: str) -> Iterator[str]:
    entries = [(NAMES[kind], COLOURS[kind], "1") for kind in kinds_of(timeline)]
    x = float(_MARGIN + _LABEL)
    for name, colour, opacity in [*entries, (waiting, BUBBLE, ".22")]:
        yield (
            f'<rect x="{x:g}" y="{top:g}" width="14" height="14" rx="3" fill="{colour}" '
            f'fill-opacity="{opacity}"/>'
        )
        yield f'<text x="{x + 20:g}" y="{top + 11:g}" class="at">{escape(name)}</text>'
        x += 36 + 7 * len(name)
