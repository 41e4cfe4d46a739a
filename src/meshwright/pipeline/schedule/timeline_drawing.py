"""Drawing a timeline in the terminal: stages down, time across."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from statistics import median_low

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from meshwright.pipeline.schedule.operations import Kind, Op, Spans

COLOURS = {
    Kind.FORWARD: "#6aa5ff",
    Kind.BACKWARD: "#7fcf8f",
    Kind.INPUT_GRAD: "#7fcf8f",
    Kind.WEIGHT_GRAD: "#f5b95f",
}
"""Fills of operations; later chunks of a stage are drawn darker."""

BUBBLE = "#8a8f98"
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
}
_INK = "#10131a"
_GAP = " … "
_WIDTH_OF_A_FILE = 100
"""Columns where no terminal says how many there are."""


def render_timeline(timeline: Spans, width: int | None = None) -> Chart:
    """Return a drawing of a timeline, as wide as the console or ``width`` columns at most.

    An operation starts with its letter; its microbatch follows where all numbers fit. What does
    not fit is left out in the middle.
    """
    return Chart(timeline, width)


@dataclass(frozen=True)
class Chart:
    """A timeline that is drawn for the width it is given."""

    timeline: Spans
    width: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = self.width or (options.max_width if options.is_terminal else _WIDTH_OF_A_FILE)
        yield from self.lines(min(options.max_width, most))

    def lines(self, width: int) -> list[Text]:
        """Return the stages, what is left out, and what the letters mean."""
        stages = self.timeline.shape.num_stages
        available = max(8, width - len(f"stage {stages - 1} "))
        per_column = self._per_column(available)
        whole = self._columns * per_column
        rows = [self._row(stage, per_column) for stage in range(stages)]
        if whole > available:
            left = (available - len(_GAP) + 1) // 2
            right = whole - (available - len(_GAP) - left)
            rows = [Text.assemble(row[:left], _GAP, row[right:]) for row in rows]
        names = [f"stage {stage} ".rjust(width - available) for stage in range(stages)]
        drawn = [Text.assemble(name, row) for name, row in zip(names, rows, strict=True)]
        for row in drawn:
            row.no_wrap, row.overflow = True, "crop"
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

    def _per_column(self, available: int) -> int:
        """Return how many characters a column has: up to a letter, a number and a space."""
        most = len(str(self.timeline.shape.num_microbatches - 1)) + 2
        return max(1, min(most, available // self._columns))

    def _row(self, stage: int, per_column: int) -> Text:
        text, drawn = Text(), 0
        for span in self.timeline.of_stage(stage):
            start, end = (self._at(point) * per_column for point in (span.start, span.end))
            text.append("·" * (start - drawn), Style(color=BUBBLE))
            fill = shade(span.op, self.timeline.shape.num_chunks)
            text.append(
                self._cell(span.op, end - start, per_column), Style(color=_INK, bgcolor=fill)
            )
            drawn = max(drawn, end)
        return text.append("·" * (self._columns * per_column - drawn), Style(color=BUBBLE))

    def _cell(self, op: Op, width: int, per_column: int) -> str:
        letter = _letter(op)
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
        parts: list[tuple[str, Style] | str] = []
        for kind in kinds_of(self.timeline):
            letter = (kind.value, Style(color=_INK, bgcolor=COLOURS[kind]))
            parts += [letter, f" {NAMES[kind]}  "]
        chunks = self.timeline.shape.num_chunks
        if chunks > 1:
            odd = " and ".join(str(chunk) for chunk in range(1, chunks, 2))
            parts.append(f"small letters: chunk {odd}  ")
        bubble = f"{float(self.timeline.bubble) * 100:.1f}%"
        return Text.assemble(*parts, ("·", Style(color=BUBBLE)), f" waiting ({bubble}, simulated)")


def time_unit(timeline: Spans) -> Fraction:
    """Return the largest time of which every start and end is a multiple."""
    points = [point for span in timeline.spans for point in (span.start, span.end)]
    below = math.lcm(*(point.denominator for point in points))
    above = math.gcd(*(int(point * below) for point in points))
    return Fraction(above, below)


def kinds_of(timeline: Spans) -> list[Kind]:
    """Return which kinds of operation occur."""
    present = {span.op.kind for span in timeline.spans}
    return [kind for kind in Kind if kind in present]


def shade(op: Op, num_chunks: int) -> str:
    """Return an operation's colour: later chunks are darker."""
    colour = COLOURS[op.kind]
    factor = 1 - 0.36 * op.chunk / max(1, num_chunks - 1) if num_chunks > 1 else 1.0
    parts = (int(int(colour[i : i + 2], 16) * factor) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _letter(op: Op) -> str:
    return op.kind.value.lower() if op.chunk % 2 else op.kind.value
