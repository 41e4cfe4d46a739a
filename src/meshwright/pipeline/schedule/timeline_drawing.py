"""When the operations of a pipeline run, drawn in the terminal or as an SVG: time goes across."""

import math
import shutil
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from statistics import median_low

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from meshwright.pipeline.schedule.operations import Kind, Op, Shape, Span
from meshwright.text.drawing import INK, MARGIN, Cell, SvgPainter, TextPainter
from meshwright.text.units import counted

_COLOURS = {
    Kind.FORWARD: "#6aa5ff",
    Kind.BACKWARD: "#7fcf8f",
    Kind.INPUT_GRAD: "#7fcf8f",
    Kind.WEIGHT_GRAD: "#f5b95f",
}
"""Fills of operations; later chunks of a stage are drawn darker."""

_BUBBLE = "#8a8f98"
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
}
_GAP = " … "
_WIDTH_OF_A_FILE = 100
"""Columns where no terminal says how many there are."""

# Lengths of an SVG are in its user units, shown as pixels.
_LABEL, _HEAD, _FOOT = 62, 34, 40
_ROW, _SPACE = 30, 6
_WIDEST_UNIT, _WIDEST = 26, 1400
_SMALLEST_NUMBERED = 13
_WAITING = 0.22
"""The opacity of the time in which a stage waits."""


@dataclass(frozen=True, repr=False)
class Timeline:
    """When each operation runs; printed as a chart, one row per stage, time from left to right."""

    shape: Shape
    spans: tuple[Span, ...]
    makespan: Fraction

    @property
    def bubble(self) -> Fraction:
        """The share of the stages' time in which they wait."""
        busy = sum((span.end - span.start for span in self.spans), Fraction(0))
        return 1 - busy / (self.makespan * self.shape.num_stages)

    @property
    def efficiency(self) -> Fraction:
        """The share of the stages' time in which they work."""
        return 1 - self.bubble

    def of_stage(self, stage: int) -> list[Span]:
        """Return a stage's operations in order."""
        return sorted((s for s in self.spans if s.stage == stage), key=lambda s: (s.start, s.end))

    def __repr__(self) -> str:
        return f"Timeline({self.shape}, waits {float(self.bubble) * 100:.1f}%)"

    def __str__(self) -> str:
        lines = TimelineDrawing(self).lines(shutil.get_terminal_size().columns)
        return "\n".join(line.plain for line in lines)


@dataclass(frozen=True)
class TimelineDrawing:
    """A timeline drawn in the width it is printed at.

    An operation starts with its letter; its microbatch follows where all numbers fit. What does
    not fit is left out in the middle.
    """

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = options.max_width if options.is_terminal else _WIDTH_OF_A_FILE
        yield from self.lines(min(options.max_width, most))

    def lines(self, width: int) -> list[Text]:
        """Return a line for each stage, a note on omitted columns, and the legend."""
        stages = self.timeline.shape.num_stages
        available = max(8, width - len(f"stage {stages - 1} "))
        # A column has room for a letter, or also for a number and a space.
        most = len(str(self.timeline.shape.num_microbatches - 1)) + 2
        per_column = max(1, min(most, available // self._columns))
        whole = self._columns * per_column
        rows = self._rows(per_column)
        if whole > available:
            left = (available - len(_GAP) + 1) // 2
            right = whole - (available - len(_GAP) - left)
            rows = [Text.assemble(row[:left], _GAP, row[right:]) for row in rows]
        names = [f"stage {stage} ".rjust(width - available) for stage in range(stages)]
        drawn = [
            Text.assemble(*parts, overflow="crop", no_wrap=True)
            for parts in zip(names, rows, strict=True)
        ]
        missing = whole - available + len(_GAP)
        note = [Text(f"(… stands for {missing} of {whole} columns)")] if whole > available else []
        return [*drawn, *note, self._legend()]

    @cached_property
    def _column(self) -> Fraction:
        """The time of one column: the shortest operation, unless it is far from typical."""
        lengths = [span.end - span.start for span in self.timeline.spans]
        return max(min(lengths), median_low(lengths) / 4)

    @cached_property
    def _columns(self) -> int:
        return self._at(self.timeline.makespan)

    def _at(self, time: Fraction) -> int:
        return math.floor(time / self._column + Fraction(1, 2))

    def _rows(self, per_column: int) -> list[Text]:
        painter = TextPainter()
        stages, end = range(self.timeline.shape.num_stages), self._columns * per_column
        for stage in stages:
            drawn = 0
            for span in self.timeline.of_stage(stage):
                start, stop = (self._at(point) * per_column for point in (span.start, span.end))
                painter.label(stage, drawn, "·" * (start - drawn), _BUBBLE)
                text = self._written(span.op, stop - start, per_column)
                painter.cell(stage, start, text, _cell(span, self.timeline).fill)
                drawn = max(drawn, stop)
            painter.label(stage, drawn, "·" * (end - drawn), _BUBBLE)
        return painter.lines(len(stages))

    def _written(self, op: Op, width: int, per_column: int) -> str:
        """Return an operation's letter, with its microbatch where all numbers fit."""
        letter = op.kind.value.lower() if op.chunk % 2 else op.kind.value
        longest = len(str(self.timeline.shape.num_microbatches - 1)) + 1
        if longest <= self._shortest[op.kind] * per_column:
            return f"{letter}{op.microbatch}".ljust(width)
        return letter.ljust(width, "─")[:width]

    @cached_property
    def _shortest(self) -> dict[Kind, int]:
        """By kind, the fewest columns an operation of it has."""
        shortest: dict[Kind, int] = {}
        for span in self.timeline.spans:
            columns = self._at(span.end) - self._at(span.start)
            shortest[span.op.kind] = min(columns, shortest.get(span.op.kind, columns))
        return shortest

    def _legend(self) -> Text:
        parts: list[tuple[str, str] | str] = []
        for kind in _kinds_of(self.timeline):
            parts += [(kind.value, f"{INK} on {_COLOURS[kind]}"), f" {_NAMES[kind]}  "]
        chunks = self.timeline.shape.num_chunks
        if chunks > 1:
            odd = " and ".join(str(chunk) for chunk in range(1, chunks, 2))
            parts.append(f"small letters: chunk {odd}  ")
        waiting = f" waiting ({_percent(self.timeline)}, simulated)"
        return Text.assemble(*parts, ("·", _BUBBLE), waiting)


def timeline_svg(timeline: Timeline, title: str = "") -> str:
    """Return an SVG drawing of a timeline; operations describe themselves on hover."""
    unit, stages = _time_unit(timeline), timeline.shape.num_stages
    across = min(_WIDEST_UNIT, _WIDEST / int(timeline.makespan / unit))
    left, scale = MARGIN + _LABEL, across / float(unit)
    whole = float(timeline.makespan) * scale
    microbatches = counted(timeline.shape.num_microbatches, "microbatch")
    title = title or f"{counted(stages, 'stage')}, {microbatches}"
    painter = SvgPainter("mw-pipe", title)
    top = MARGIN + _HEAD
    for stage in range(stages):
        painter.label(MARGIN, top + 20, f"stage {stage}", "at")
        painter.box((left, top, whole, _ROW), _BUBBLE, _WAITING)
        for span in timeline.of_stage(stage):
            x, width = left + float(span.start) * scale, float(span.end - span.start) * scale
            gap, cell = min(1.5, width / 8), _cell(span, timeline)
            label = [(19, cell.label, "number")] if width >= _SMALLEST_NUMBERED else []
            painter.cell((x + gap / 2, top, width - gap, _ROW), cell, *label, radius=3)
        top += _ROW + _SPACE
    _svg_legend(painter, timeline, top + 14)
    about = f"Stages down, time across. Stages wait {_percent(timeline)} of the time, simulated."
    return painter.page(left + max(whole, 420) + MARGIN, top + _FOOT, title, about)


def _svg_legend(painter: SvgPainter, timeline: Timeline, top: float) -> None:
    x = float(MARGIN + _LABEL)
    entries = [(_NAMES[kind], _COLOURS[kind], 1.0) for kind in _kinds_of(timeline)]
    waiting = f"waiting {_percent(timeline)}, simulated"
    for name, fill, opacity in [*entries, (waiting, _BUBBLE, _WAITING)]:
        painter.box((x, top, 14, 14), fill, opacity)
        painter.label(x + 20, top + 11, name, "at")
        x += 36 + 7 * len(name)


def _cell(span: Span, timeline: Timeline) -> Cell:
    """Return the cell of an operation: its microbatch, its colour, and what it computes."""
    op, chunks = span.op, timeline.shape.num_chunks
    chunk = f", chunk {op.chunk}" if chunks > 1 else ""
    about = f"{_NAMES[op.kind]} of microbatch {op.microbatch}{chunk}, stage {span.stage}"
    return Cell(str(op.microbatch), _shade(op, chunks), about)


def _percent(timeline: Timeline) -> str:
    return f"{float(timeline.bubble) * 100:.1f}%"


def _time_unit(timeline: Timeline) -> Fraction:
    """Return the largest time of which every start and end is a multiple."""
    points = [point for span in timeline.spans for point in (span.start, span.end)]
    below = math.lcm(*(point.denominator for point in points))
    above = math.gcd(*(int(point * below) for point in points))
    return Fraction(above, below)


def _kinds_of(timeline: Timeline) -> list[Kind]:
    """Return which kinds of operation occur."""
    present = {span.op.kind for span in timeline.spans}
    return [kind for kind in Kind if kind in present]


def _shade(op: Op, num_chunks: int) -> str:
    """Return an operation's colour: later chunks are darker."""
    colour = _COLOURS[op.kind]
    factor = 1 - 0.36 * op.chunk / max(1, num_chunks - 1) if num_chunks > 1 else 1.0
    parts = (int(int(colour[i : i + 2], 16) * factor) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)
