"""Drawing a mesh in the terminal: one cell per device, heavy lines around each process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from meshwright.mesh.picture import Indices, Picture, picture_of
from meshwright.mesh.terminal_layout import EMPTY, GAP, SPACE, Block, Layout, Limits, fit
from meshwright.text.columns import drawing_width

MAX_LINES = 30
"""Taller drawings leave out coordinates."""

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


def render_mesh(mesh: Mesh | AbstractMesh, *, title: str | None = None) -> RenderableType:
    """Return a drawing of a mesh for rich.

    The innermost axis runs along the columns of a block, the next along its rows, and one block
    is drawn for each coordinate of the outer axes. Coordinates that do not fit are left out.

    Args:
        mesh: a mesh, or an abstract one.
        title: replaces the first line, which lists the axes and devices.
    """
    return MeshDrawing(picture_of(mesh), title)


@dataclass(frozen=True)
class MeshDrawing:
    """A drawing that fits itself to the width it is printed at."""

    picture: Picture
    title: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines of the drawing."""
        yield Text(self.title or self.picture.headline, style="bold")
        yield Text()
        layout, lines = self._fitted(drawing_width(options))
        yield from lines
        yield from _legend(self.picture, layout)

    def _fitted(self, width: int) -> tuple[Layout, list[Text]]:
        layout, lines = self._painted(width, _LIMITS[0])
        for limits in _LIMITS[1:]:
            if len(lines) <= MAX_LINES:
                break
            layout, lines = self._painted(width, limits)
        return layout, lines

    def _painted(self, width: int, limits: Limits) -> tuple[Layout, list[Text]]:
        layout = fit(self.picture, width, limits)
        return layout, _Painter(self.picture, layout).lines()


def _legend(picture: Picture, layout: Layout) -> Iterator[Text]:
    if picture.legend or not layout.shows_all:
        yield Text()
    if picture.legend:
        yield Text("heavy lines enclose the devices of one process", style="dim")
        yield from (Text(f"  {line}", style="dim") for line in picture.legend)
    if not layout.shows_all:
        yield Text("… and ⋮ stand for coordinates that are not shown", style="dim")


class _Painter:
    """Puts styled pieces of text on lines, block by block."""

    def __init__(self, picture: Picture, layout: Layout) -> None:
        self._picture = picture
        self._layout = layout
        self._pieces: defaultdict[int, list[tuple[int, str, str]]] = defaultdict(list)

    def lines(self) -> list[Text]:
        top = 0
        for band in self._layout.bands:
            top = self._paint_band(top, band) + 1
        return [self._line(i) for i in range(top - 1)]

    def _line(self, i: int) -> Text:
        line = Text(no_wrap=True, overflow="crop")
        for column, text, style in sorted(self._pieces[i]):
            line.append(" " * (column - len(line)))
            line.append(text, style)
        return line

    def _put(self, line: int, column: int, text: str, style: str = "") -> None:
        self._pieces[line].append((column, text, style))

    def _paint_band(self, top: int, band: Sequence[Block]) -> int:
        """Draw blocks side by side and return the first line below them."""
        layout = self._layout
        if band == [None]:
            self._put(top, layout.label_width, "⋮")
            return top + 1
        devices = {block: layout.devices(block) for block in band if block}
        owners = {block: self._owners(shown) for block, shown in devices.items()}
        row_lines = _row_lines(list(owners.values()))
        body = top + bool(layout.title((0, 0))) + bool(layout.names[3])
        left = layout.label_width
        self._paint_row_labels(body, row_lines)
        for block in band:
            if block is None:
                self._put(body + row_lines[0], left, "…")
                left += 1 + SPACE
                continue
            self._put(top, left + 1, layout.title(block), "bold")
            self._paint_column_labels(body - 1, left)
            self._paint_cells(body, left, devices[block], row_lines)
            self._paint_borders(body, left, owners[block], row_lines)
            left += layout.block_width + SPACE
        return body + row_lines[-1] + 2

    def _owners(self, devices: Indices) -> Indices:
        """Return the process of each shown device, with a rim of EMPTY around the block."""
        known = np.append(self._picture.processes, [EMPTY, GAP])  # indexed by EMPTY and GAP too
        return np.pad(known[devices], 1, constant_values=EMPTY)

    def _paint_row_labels(self, body: int, row_lines: Sequence[int]) -> None:
        name = self._layout.names[2]
        if not name:
            return
        self._put(body + row_lines[0], 0, name, "bold")
        if len(row_lines) > 1:
            self._put(body + row_lines[1], 0, "↓".center(len(name)).rstrip(), "dim")
        for row, line in zip(self._layout.rows, row_lines, strict=True):
            label = "⋮" if row == GAP else str(row * self._layout.stride)
            self._put(body + line, self._layout.label_width - 1 - len(label), label, "dim")

    def _paint_column_labels(self, line: int, left: int) -> None:
        layout = self._layout
        if not layout.names[3]:
            return
        if left == layout.label_width:
            self._put(line, left - len(layout.names[3]) - 3, layout.names[3], "bold")
            self._put(line, left - 2, "→", "dim")
        for place, column in enumerate(layout.columns):
            label = "…" if column == GAP else str(column)
            end = left + (place + 1) * (layout.cell_width + 1) - 1
            self._put(line, end - len(label), label, "dim")

    def _paint_cells(
        self, body: int, left: int, devices: Indices, row_lines: Sequence[int]
    ) -> None:
        width = self._layout.cell_width
        for (row, column), index in np.ndenumerate(devices):
            if index == EMPTY:
                continue
            label, style = _ellipsis(self._layout, row, column), "dim"
            if index != GAP:
                label = str(self._picture.ids[int(index)])
                style = f"#16181d on {self._picture.colour(int(index))}"
            where = left + 1 + column * (width + 1)
            self._put(body + row_lines[row], where, f"{label:>{width - 1}} ", style)

    def _paint_borders(
        self, body: int, left: int, owners: Indices, row_lines: Sequence[int]
    ) -> None:
        border = _HEAVY if len(set(self._picture.processes)) > 1 else _LIGHT
        style = "dim" if border == _LIGHT else ""
        upright = _weights(owners[:, :-1], owners[:, 1:], border, inside=_LIGHT)
        level = _weights(owners[:-1], owners[1:], border, inside=0)
        step = self._layout.cell_width + 1
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


def _ellipsis(layout: Layout, row: int, column: int) -> str:
    across, down = layout.columns[column] == GAP, layout.rows[row] == GAP
    return "⋱" if across and down else "…" if across else "⋮"
