"""Drawing a mesh, and the rows that its devices hold, as a self-contained SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshwright.mesh.axes import BATCH_AXES, CONTEXT, divisors
from meshwright.mesh.picture import (
    EMPTY,
    BlockAt,
    Indices,
    Layout,
    Picture,
    id_ranges,
    picture_of,
    wrap,
)
from meshwright.text.drawing import MARGIN, SvgPainter

_WIDTH, _HEIGHT, _SPACE, _ROW_LABEL, _LINE = 118, 40, 6, 104, 20
_MOST = 8
"""Replicas, and parts of a row, that are drawn."""

Rows = tuple[int, int]
"""What is divided: the samples of a step, and the positions of each."""


def draw_rows(painter: SvgPainter, picture: Picture, rows: Rows, top: float) -> tuple[float, float]:
    """Draw a line for each replica, with a cell for each part of its rows; return width and end."""
    devices = _by_part(picture)
    (replicas, parts, _), (samples, length) = devices.shape, rows
    samples, own = samples // replicas, -(-length // parts)
    painter.label(MARGIN, top, f"rows of {length:,} positions: what devices hold", "axis")
    top += 0.7 * _LINE
    shown = devices[:_MOST, :_MOST]
    for (replica, part), _ in np.ndenumerate(shown[:, :, 0]):
        x, y = MARGIN + _ROW_LABEL + part * (_WIDTH + _SPACE), top + replica * (_HEIGHT + _SPACE)
        if part == 0:
            held = _span(replica * samples, samples)
            noun = "sample" if samples == 1 else "samples"
            painter.label(x - 12, y + _HEIGHT / 2 + 4, f"{noun} {held}", "at end")
        ids = [picture.ids[index] for index in shown[replica, part]]
        noun = "device" if len(ids) == 1 else "devices"
        where = _span(part * own, min(own, length - part * own))
        texts = (18, where, "id long"), (32, f"{noun} {id_ranges(ids)}", "number")
        cell = picture.cell(int(shown[replica, part, 0]))
        painter.cell((x, y, _WIDTH, _HEIGHT), cell, *texts, radius=6)
    end = top + len(shown) * (_HEIGHT + _SPACE) + _LINE
    if shown.shape[:2] != (replicas, parts):
        drawn = f"{len(shown)} of {replicas} replicas, {shown.shape[1]} of {parts} parts of a row"
        painter.label(MARGIN, end, drawn, "at")
        end += _LINE
    return MARGIN + _ROW_LABEL + shown.shape[1] * (_WIDTH + _SPACE), end + _LINE


def _by_part(picture: Picture) -> Indices:
    """Return devices by replica, part of a row, and those that hold the same."""
    names = list(picture.axes)
    order = [names.index(axis) for axis in (*BATCH_AXES, CONTEXT) if axis in names]
    order += [number for number in range(len(names)) if number not in order]
    grid = np.arange(len(picture.ids)).reshape(tuple(picture.axes.values())).transpose(order)
    replicas = int(np.prod([picture.axes.get(axis, 1) for axis in BATCH_AXES]))
    return grid.reshape(replicas, picture.axes.get(CONTEXT, 1), -1)


def _span(first: int, count: int) -> str:
    """Return ``0–31`` for 32 positions from the first on."""
    if count < 1:
        return "empty"
    return f"{first:,}" if count == 1 else f"{first:,}–{first + count - 1:,}"


# All lengths are in SVG user units, shown as pixels.
_CELL_WIDTH, _CELL_HEIGHT, _CELL_SPACE = 44, 34, 6
_ACROSS, _DOWN = _CELL_WIDTH + _CELL_SPACE, _CELL_HEIGHT + _CELL_SPACE
_BLOCK_SPACE = 34
_LABEL = 54
_MAX_TITLE_WIDTH = 150
_MAX_ROW_LENGTH = 16


def mesh_svg(mesh: Mesh | AbstractMesh, rows: Rows | None = None) -> str:
    """Return an SVG drawing of a mesh: one cell per device, an outline around each process.

    The drawing suits light and dark pages, and shows each device's coordinates and process on
    hover. Below is which part of ``rows`` each device holds.
    """
    picture = picture_of(mesh)
    names, grid = picture.blocks()
    stride = 1
    if len(picture.axes) == 1 and grid.shape[3] > _MAX_ROW_LENGTH:
        stride = _MAX_ROW_LENGTH
        names, grid = ("", "", names[3], ""), wrap(grid, stride)
    outer, inner, height, width = grid.shape
    sizes = _Sizes.of(names, height, width)
    per_band = inner if names[0] else sizes.balanced_band(inner)
    bands = [
        [(block, first + place) for place in range(min(per_band, inner - first))]
        for block in range(outer)
        for first in range(0, inner, per_band)
    ]
    layout = Layout(picture, names, grid, stride, range(height), range(width), bands)
    return _Drawing(layout, sizes).svg(rows)


@dataclass(frozen=True)
class _Sizes:
    """Lengths of a drawing: where blocks start, what is above their cells, and their distances."""

    left: int
    head: int
    across: int
    down: int

    @classmethod
    def of(cls, names: tuple[str, str, str, str], rows: int, columns: int) -> _Sizes:
        outer, inner, row_axis, column_axis = map(bool, names)
        head = _LINE * (inner + 2 * column_axis)
        across = max(columns * _ACROSS, _MAX_TITLE_WIDTH if outer else 0) + _BLOCK_SPACE
        left = MARGIN + (_LABEL if row_axis else 0)
        return cls(left, head, across, rows * _DOWN + head + _BLOCK_SPACE)

    def balanced_band(self, count: int) -> int:
        """Return the number of blocks side by side that brings the drawing nearest to 3:2."""
        ratio = self.across / self.down / 1.5
        return min(divisors(count), key=lambda n: abs(math.log(n / (count // n) * ratio)))


class _Drawing:
    """Paints a layout, block by block."""

    def __init__(self, layout: Layout, sizes: _Sizes) -> None:
        self._layout, self._picture, self._sizes = layout, layout.picture, sizes
        self._painter = SvgPainter("mw-mesh", self._picture.headline)

    def svg(self, held: Rows | None) -> str:
        sizes, bands = self._sizes, self._layout.bands
        for number, band in enumerate(bands):
            for place, block in enumerate(band):
                left = sizes.left + place * sizes.across
                top = MARGIN + 2 * _LINE + sizes.head + number * sizes.down
                if block is not None:
                    self._block(block, left, top)
        legend = self._picture.legend
        if legend:
            legend = ["outlines enclose the devices of one process (p)", *legend]
        end, rows_width = MARGIN + 2 * _LINE + len(bands) * sizes.down, 0.0
        if held is not None:
            rows_width, end = draw_rows(self._painter, self._picture, held, end)
        for number, line in enumerate(legend):
            self._painter.label(MARGIN, end + number * _LINE, line, "at")
        # Readers have different fonts; these are the widths of a wide one.
        text_width = max(11 * len(self._picture.headline), *(7 * len(line) for line in legend), 0)
        blocks_width = sizes.left + len(bands[0]) * sizes.across - _BLOCK_SPACE
        width = MARGIN + max(blocks_width, text_width, rows_width)
        height, title = end + len(legend) * _LINE, f"Mesh {self._picture.headline}"
        return self._painter.page(width, height, title, self._description())

    def _description(self) -> str:
        named = [name for name in self._layout.names if name]
        roles = ["outer blocks", "blocks", "rows", "columns"][-len(named) or 4 :]
        if self._layout.stride > 1:
            roles = [f"rows of {self._layout.stride}"]
        layout = ", ".join(f"{axis} along {role}" for axis, role in zip(named, roles, strict=True))
        owned = "; ".join(f"process {p} owns {i}" for p, i in self._picture.process_devices.items())
        return f"One cell per device{': ' if layout else ''}{layout}. Devices by process: {owned}."

    def _block(self, block: BlockAt, left: int, top: int) -> None:
        """Draw one block: its labels, its cells and the outlines of its processes."""
        self._labels(block, left, top)
        several = self._picture.several_processes
        size = "id long" if max(self._picture.ids) > 999 else "id"
        for (row, column), index in np.ndenumerate(self._layout.devices(block)):
            if index == EMPTY:
                continue
            cell = self._picture.cell(int(index))
            labels = [(17 if several else 22, cell.label, size)]
            if several:
                labels.append((28, f"p{self._picture.processes[int(index)]}", "own"))
            box = (left + column * _ACROSS, top + row * _DOWN, _CELL_WIDTH, _CELL_HEIGHT)
            self._painter.cell(box, cell, *labels, radius=6)
        if several:
            outlines = _outlines(self._layout.owners(block), left, top)
            self._painter.add(f'<path class="outline" d="{outlines}"/>')

    def _labels(self, block: BlockAt, left: int, top: int) -> None:
        layout, label = self._layout, self._painter.label
        _, _, row_axis, column_axis = layout.names
        if title := layout.title(block):
            label(left, top - self._sizes.head + 6, title, "axis")
        if column_axis:
            middle = left + (len(layout.columns) * _ACROSS - _CELL_SPACE) / 2
            label(middle, top - _LINE - 8, f"{column_axis} →", "axis mid")
            for column, text in enumerate(layout.column_labels):
                label(left + column * _ACROSS + _CELL_WIDTH / 2, top - 9, text, "at mid")
        if row_axis and left == self._sizes.left:
            x, y = left - _LABEL + 12, top + (len(layout.rows) * _DOWN - _CELL_SPACE) / 2
            label(x, y, f"← {row_axis}", "axis mid", f'transform="rotate(-90 {x} {y})"')
            for row, text in enumerate(layout.row_labels):
                label(left - 12, top + row * _DOWN + _CELL_HEIGHT / 2 + 4, text, "at end")


def _outlines(owners: Indices, left: int, top: int) -> str:
    """Return path data for the lines between cells of different processes."""
    left, top = left - _CELL_SPACE // 2, top - _CELL_SPACE // 2
    upright = np.argwhere(owners[1:-1, :-1] != owners[1:-1, 1:])
    level = np.argwhere(owners[:-1, 1:-1] != owners[1:, 1:-1])
    parts = [f"M{left + c * _ACROSS} {top + r * _DOWN}v{_DOWN}" for r, c in upright]
    parts += [f"M{left + c * _ACROSS} {top + r * _DOWN}h{_ACROSS}" for r, c in level]
    return "".join(parts)
