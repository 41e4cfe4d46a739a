"""Tables and indented text for the terminal that stay readable at any width, and in files."""

import io
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

GAP = "  "
BETWEEN = " · "
INDENT = 4
WRAPPED_WIDTH = 20
"""The last column wraps rather than being narrower."""
LEAST_WIDTH = 20
"""Columns for text, however far it is indented."""
FILE_WIDTH = 10_000
"""Columns of what is not a terminal: lines of a file are searched, and do not wrap."""
WIDEST_DRAWING = 200
"""Columns of a drawing in a file, where lines may be of any length."""

Cell = str | Text


@dataclass(frozen=True)
class Columns:
    """A table: aligned columns where they fit, otherwise the cells of each row below its first.

    No cell is cut off, and lines do not end in spaces. An empty row is an empty line; rows may
    each have a line of ``notes`` below, and a style.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Collection[str] = ()
    notes: Sequence[str] = ()
    styles: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table as lines."""
        columns = zip(self.head, *(row for row in self.rows if row), strict=True)
        widths = [max(cell_len(_plain(cell)) for cell in column) for column in columns]
        before = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
        wrappable = self.head[-1] not in self.right
        least = min(widths[-1], WRAPPED_WIDTH) if wrappable else widths[-1]
        fits = before + least <= options.max_width
        if fits:
            yield Indented(self._aligned(self.head, widths), before, "dim", first=0)
        for number, row in enumerate(self.rows):
            style = self.styles[number] if self.styles else ""
            if row and fits:
                yield Indented(self._aligned(row, widths), before, style, first=0)
            elif row:
                yield Indented(row[0], style=style, first=0)
                for line in self._listed(row, options.max_width - INDENT):
                    yield Indented(line, style=style)
            else:
                yield Text()
            if self.notes:
                yield Indented(self.notes[number], style="dim")

    def _aligned(self, row: Sequence[Cell], widths: Sequence[int]) -> Text:
        line = Text()
        for name, cell, width in zip(self.head, row, widths, strict=True):
            space = " " * (width - cell_len(_plain(cell)))
            parts = (space, cell) if name in self.right else (cell, space)
            line.append_text(Text.assemble(*parts, GAP))
        line.rstrip()
        return line

    def _listed(self, row: Sequence[Cell], width: int) -> list[Text]:
        """Return the cells after the first with their names, as many on a line as fit."""
        lines: list[Text] = []
        for name, cell in zip(self.head[1:], row[1:], strict=True):
            if not _plain(cell):
                continue
            named = Text.assemble((f"{name} ", "dim"), cell)
            if lines and lines[-1].cell_len + len(BETWEEN) + named.cell_len <= width:
                lines[-1] = Text(BETWEEN).join([lines[-1], named])
            else:
                lines.append(named)
        return lines


@dataclass(frozen=True)
class Indented:
    """Text whose lines are all indented, also those it is wrapped into; the first may differ."""

    text: Cell
    indent: int = INDENT
    style: str = ""
    first: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        text = Text(self.text) if isinstance(self.text, str) else self.text
        space = self.indent if self.first is None else self.first
        for paragraph in text.split("\n", allow_blank=True):
            rest = paragraph
            while True:
                width = max(options.max_width - space, LEAST_WIDTH)
                line = rest.wrap(console, width, overflow="fold")[0]
                rest = rest[len(line.plain) :]
                rest = rest[len(rest.plain) - len(rest.plain.lstrip()) :]
                line.rstrip()
                shown = Text.assemble(" " * space, line, style=self.style)
                shown.no_wrap, shown.overflow = True, "ignore"
                yield shown
                space = self.indent
                if not rest.plain:
                    break


def as_text(renderable: RenderableType) -> str:
    """Return a table or text as it would be in a file."""
    console = Console(file=io.StringIO(), width=FILE_WIDTH, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().rstrip("\n")


def stream_width(stream: TextIO) -> int | None:
    """Return the columns of a stream; None for a terminal, which knows its own."""
    return None if stream.isatty() or "COLUMNS" in os.environ else FILE_WIDTH


def drawing_width(options: ConsoleOptions) -> int:
    """Return the columns that a drawing may take."""
    return min(options.max_width, WIDEST_DRAWING)


def _plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.plain
