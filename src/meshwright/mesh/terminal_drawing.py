"""Drawing a mesh in the terminal: one cell per device, heavy lines around each process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from meshwright.mesh.picture import EMPTY, GAP, BlockAt, Indices, Layout, Picture, picture_of, wrap
from meshwright.text.columns import drawing_width
from meshwright.text.drawing import TextPainter

MAX_LINES = 30
"""Taller drawings leave out coordinates."""

SPACE = 3
"""Columns between neighbouring blocks."""


@dataclass(frozen=True)
class Limits:
    """The most blocks along each outer axis, and the most rows and columns of a block."""

    blocks: int
    rows: int
    columns: int


_ALL = 1 << 30
_LIMITS = (
    Limits(blocks=_ALL, rows=_ALL, columns=_ALL),
    Limits(blocks=_ALL, rows=8, columns=_ALL),
    Limits(blocks=4, rows=_ALL, columns=_ALL),
    Limits(blocks=4, rows=8, columns=_ALL),
    Limits(blocks=3, rows=8, columns=_ALL),
    Limits(blocks=3, rows=8, columns=4),
    Limits(blocks=3, rows=4, columns=4),
)
"""Tried in turn until the drawing is short enough."""
_LIGHT, _HEAVY = 1, 2
_JUNCTIONS = " ╴╸╷┐┑╻┒┓╶─╾┌┬┭┎┰┱╺╼━┍┮┯┏┲┳╵┘┙│┤┥╽┧┪└┴┵├┼┽┟╁╅┕┶┷┝┾┿┢╆╈╹┚┛╿┦┩┃┨┫┖┸┹┞╀╃┠╂╉┗┺┻┡╄╇┣╊╋"
"""Where lines meet: the weights of the up, right, down and left arms (0 none, 1 light, 2 heavy)
are the digits of a base-3 index."""
_ROUND = str.maketrans("┌┐└┘", "╭╮╰╯")


def render_mesh(mesh: Mesh | AbstractMesh) -> RenderableType:
    """Return a drawing of a mesh for rich.

    The innermost axis runs along the columns of a block, the next along its rows, and one block
    is drawn for each coordinate of the outer axes. Coordinates that do not fit are left out.
    """
    return MeshDrawing(picture_of(mesh))


@dataclass(frozen=True)
class MeshDrawing:
    """A drawing that fits itself to the width it is printed at."""

    picture: Picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines of the drawing."""
        yield Text(self.picture.headline, style="bold")
        yield Text()
        layout, lines = self._fitted(drawing_width(options))
        yield from lines
        yield from _legend(self.picture, layout)

    def _fitted(self, width: int) -> tuple[Layout, list[Text]]:
        for limits in _LIMITS[:-1]:
            painter = _Painter(self.picture, width, limits)
            if len(lines := painter.lines()) <= MAX_LINES:
                return painter.layout, lines
        painter = _Painter(self.picture, width, _LIMITS[-1])
        return painter.layout, painter.lines()


def _legend(picture: Picture, layout: Layout) -> Iterator[Text]:
    if picture.legend or not layout.shows_all:
        yield Text()
    if picture.legend:
        yield Text("heavy lines enclose the devices of one process", style="dim")
        yield from (Text(f"  {line}", style="dim") for line in picture.legend)
    if not layout.shows_all:
        yield Text("… and ⋮ stand for coordinates that are not shown", style="dim")


class _Painter:
    """Fits a mesh into a number of columns, and paints it block by block."""

    def __init__(self, picture: Picture, width: int, limits: Limits) -> None:
        self._painter = TextPainter()
        self._put = self._painter.label
        self._cell_width = 2 + max(len(str(device)) for device in picture.ids)
        names, grid = picture.blocks()
        fitting = (width - _label_width(names, grid) - 1) // (self._cell_width + 1)
        stride = 1
        if len(picture.axes) == 1 and grid.shape[3] > fitting:
            stride = next((n for n in (32, 16, 8, 4) if n <= fitting), max(fitting, 1))
            names, grid = ("", "", names[3], ""), wrap(grid, stride)
        self._left = _label_width(names, grid, stride)
        outer, inner, rows, columns = (
            visible(size, most)
            for size, most in zip(
                grid.shape,
                (limits.blocks, limits.blocks, limits.rows, min(max(fitting, 3), limits.columns)),
                strict=True,
            )
        )
        layout = Layout(picture, names, grid, stride, rows, columns, bands=())
        longest_title = layout.title((grid.shape[0] - 1, grid.shape[1] - 1))
        across = 1 + len(columns) * (self._cell_width + 1)
        self._block_width = max(across, len(longest_title) + 1)
        bands: list[list[BlockAt | None]] = []
        for a in outer:
            blocks = [(a, b) if GAP not in (a, b) else None for b in inner]
            bands += _fill_bands(blocks, self._block_width, width - self._left)
        self.layout = replace(layout, bands=bands)

    def lines(self) -> list[Text]:
        top = 0
        for band in self.layout.bands:
            top = self._paint_band(top, band) + 1
        return self._painter.lines(top - 1)

    def _paint_band(self, top: int, band: Sequence[BlockAt | None]) -> int:
        """Draw blocks side by side and return the first line below them."""
        layout, left = self.layout, self._left
        if band == [None]:
            self._put(top, left, "⋮")
            return top + 1
        owners = {block: layout.owners(block) for block in band if block}
        row_lines = _row_lines(list(owners.values()))
        body = top + bool(layout.title((0, 0))) + bool(layout.names[3])
        self._paint_row_labels(body, row_lines)
        for block in band:
            if block is None:
                self._put(body + row_lines[0], left, "…")
                left += 1 + SPACE
                continue
            self._put(top, left + 1, layout.title(block), "bold")
            self._paint_column_labels(body - 1, left)
            self._paint_cells(body, left, layout.devices(block), row_lines)
            self._paint_borders(body, left, owners[block], row_lines)
            left += self._block_width + SPACE
        return body + row_lines[-1] + 2

    def _paint_row_labels(self, body: int, row_lines: Sequence[int]) -> None:
        name = self.layout.names[2]
        if not name:
            return
        self._put(body + row_lines[0], 0, name, "bold")
        if len(row_lines) > 1:
            self._put(body + row_lines[1], 0, "↓".center(len(name)).rstrip(), "dim")
        for label, line in zip(self.layout.row_labels, row_lines, strict=True):
            self._put(body + line, self._left - 1 - len(label), label, "dim")

    def _paint_column_labels(self, line: int, left: int) -> None:
        name = self.layout.names[3]
        if not name:
            return
        if left == self._left:
            self._put(line, left - len(name) - 3, name, "bold")
            self._put(line, left - 2, "→", "dim")
        for place, label in enumerate(self.layout.column_labels):
            end = left + (place + 1) * (self._cell_width + 1) - 1
            self._put(line, end - len(label), label, "dim")

    def _paint_cells(
        self, body: int, left: int, devices: Indices, row_lines: Sequence[int]
    ) -> None:
        width = self._cell_width
        for (row, column), index in np.ndenumerate(devices):
            line, where = body + row_lines[row], left + 1 + column * (width + 1)
            if index == GAP:
                across, down = self.layout.columns[column] == GAP, self.layout.rows[row] == GAP
                label = "⋱" if across and down else "…" if across else "⋮"
                self._put(line, where, f"{label:>{width - 1}} ", "dim")
            elif index != EMPTY:
                cell = self.layout.picture.cell(int(index))
                self._painter.cell(line, where, f"{cell.label:>{width - 1}} ", cell.fill)

    def _paint_borders(
        self, body: int, left: int, owners: Indices, row_lines: Sequence[int]
    ) -> None:
        border = _HEAVY if self.layout.picture.several_processes else _LIGHT
        style = "dim" if border == _LIGHT else ""
        upright = _weights(owners[:, :-1], owners[:, 1:], border, inside=_LIGHT)
        level = _weights(owners[:-1], owners[1:], border, inside=0)
        step = self._cell_width + 1
        for row, line in enumerate(row_lines):
            for column, weight in enumerate(upright[row + 1]):
                self._put(body + line, left + column * step, " │┃"[weight], style)
        for row, line in enumerate([row_lines[0] - 1, *(line + 1 for line in row_lines)]):
            if line in row_lines:
                continue  # no rule below this row: the next row follows at once
            for column in range(upright.shape[1]):
                up, down = upright[row][column], upright[row + 1][column]
                before, after = level[row][column], level[row][column + 1]
                text = _JUNCTIONS[up * 27 + after * 9 + down * 3 + before].translate(_ROUND)
                if column + 1 < upright.shape[1]:
                    text += " ─━"[after] * (step - 1)
                self._put(body + line, left + column * step, text, style)


def _row_lines(blocks: Sequence[Indices]) -> list[int]:
    """Return the line of each row below the top border, with space for rules between processes.

    A rule is needed where any block of the band has different processes above and below.
    """
    lines = [1]
    for row in range(1, len(blocks[0]) - 2):
        ruled = any(_weights(b[row], b[row + 1], _HEAVY, inside=0).any() for b in blocks)
        lines.append(lines[-1] + 1 + ruled)
    return lines


def _weights(one: Indices, other: Indices, border: int, *, inside: int) -> Indices:
    """Return the weight of the line between neighbours, given the processes that own them."""
    outside = (one == EMPTY).astype(int) + (other == EMPTY)
    differ = (one != other) & (one != GAP) & (other != GAP)
    weight = np.where(differ, _HEAVY, inside)
    return np.where(outside == 2, 0, np.where(outside == 1, border, weight))


def visible(size: int, most: int) -> list[int]:
    """Return the shown positions out of ``size``: all, or the first ones, GAP and the last."""
    return list(range(size)) if size <= most else [*range(most - 2), GAP, size - 1]


def _label_width(names: Sequence[str], grid: Indices, stride: int = 1) -> int:
    """Return the columns left of the first block."""
    row_label = f"{names[2]} {(grid.shape[2] - 1) * stride} " if names[2] else ""
    column_label = f"{names[3]} → " if names[3] else ""
    return max(len(row_label), len(column_label))


def _fill_bands(
    blocks: Sequence[BlockAt | None], block: int, width: int
) -> list[list[BlockAt | None]]:
    """Break a row of blocks into bands no wider than ``width``; an ellipsis is one column wide."""
    if all(b is None for b in blocks):
        return [[None]]
    bands: list[list[BlockAt | None]] = [[]]
    used = 0
    for item in blocks:
        size = 1 if item is None else block
        if bands[-1] and used + size > width:
            bands.append([])
            used = 0
        bands[-1].append(item)
        used += size + SPACE
    return bands
