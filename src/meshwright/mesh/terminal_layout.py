"""Fitting a mesh into a terminal: which coordinates are shown, and how blocks are arranged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.mesh.picture import Indices, Picture

GAP, EMPTY = -1, -2
"""Cells without a device: an ellipsis, or nothing (outside the mesh)."""

SPACE = 3
"""Columns between neighbouring blocks."""

Block = tuple[int, int] | None
"""Coordinates of a block along the two outer axes; None for an ellipsis."""


@dataclass(frozen=True)
class Layout:
    """What is drawn of a mesh, and how wide its parts are.

    Attributes:
        names: axis names of the outer blocks, inner blocks, rows and columns ("" if there is none).
        grid: devices by (outer block, inner block, row, column); EMPTY outside the mesh.
        rows: the visible rows, GAP for an ellipsis.
        columns: the visible columns, GAP for an ellipsis.
        stride: devices of the row axis from one row to the next (more than 1 if it is wrapped).
        bands: the blocks drawn side by side, band by band.
        cell_width: columns of a device's cell, without its borders.
        label_width: columns left of the first block.
    """

    names: tuple[str, str, str, str]
    grid: Indices
    rows: Sequence[int]
    columns: Sequence[int]
    stride: int
    bands: Sequence[Sequence[Block]]
    cell_width: int
    label_width: int

    @property
    def shows_all(self) -> bool:
        """Whether no coordinate is left out."""
        gap_between_blocks = any(None in band for band in self.bands)
        return not (GAP in self.rows or GAP in self.columns or gap_between_blocks)

    @property
    def block_width(self) -> int:
        """Columns of a block, with its borders and its title."""
        return _block_width(self.names, self.grid, len(self.columns), self.cell_width)

    def title(self, block: tuple[int, int]) -> str:
        """Return ``pipe 0 · data 1`` for a block; empty when there is only one."""
        return _title(self.names, block)

    def devices(self, block: tuple[int, int]) -> Indices:
        """Return the shown devices of a block by row and column, GAP and EMPTY included."""
        rows, columns = np.array(self.rows), np.array(self.columns)
        shown = self.grid[block][np.ix_(rows, columns)]
        return np.where((rows == GAP)[:, None] | (columns == GAP), GAP, shown)


@dataclass(frozen=True)
class Limits:
    """The most blocks along each outer axis, and the most rows and columns of a block."""

    blocks: int
    rows: int
    columns: int


def fit(picture: Picture, width: int, limits: Limits) -> Layout:
    """Choose what to show of a mesh in ``width`` characters."""
    names, grid = picture.blocks()
    cell_width = 2 + max(len(str(device)) for device in picture.ids)
    stride = 1
    fitting = (width - _label_width(names, grid) - 1) // (cell_width + 1)
    if len(picture.axes) == 1 and grid.shape[3] > fitting:
        stride = _wrap_length(fitting)
        names, grid = ("", "", names[3], ""), wrap(grid, stride)
    label_width = _label_width(names, grid, stride)
    columns = visible(grid.shape[3], min(max(fitting, 3), limits.columns))
    blocks = [
        [(a, b) if GAP not in (a, b) else None for b in visible(grid.shape[1], limits.blocks)]
        for a in visible(grid.shape[0], limits.blocks)
    ]
    sample = _block_width(names, grid, len(columns), cell_width)
    bands = [band for row in blocks for band in _fill_bands(row, sample, width - label_width)]
    rows = visible(grid.shape[2], limits.rows)
    return Layout(names, grid, rows, columns, stride, bands, cell_width, label_width)


def visible(size: int, most: int) -> list[int]:
    """Return the shown positions out of ``size``: all, or the first ones, GAP and the last."""
    return list(range(size)) if size <= most else [*range(most - 2), GAP, size - 1]


def _title(names: Sequence[str], block: tuple[int, int]) -> str:
    return " · ".join(f"{n} {i}" for n, i in zip(names[:2], block, strict=True) if n)


def _block_width(names: Sequence[str], grid: Indices, num_columns: int, cell_width: int) -> int:
    longest_title = _title(names, (grid.shape[0] - 1, grid.shape[1] - 1))
    return max(1 + num_columns * (cell_width + 1), len(longest_title) + 1)


def _label_width(names: Sequence[str], grid: Indices, stride: int = 1) -> int:
    row_label = f"{names[2]} {(grid.shape[2] - 1) * stride} " if names[2] else ""
    column_label = f"{names[3]} → " if names[3] else ""
    return max(len(row_label), len(column_label))


def _wrap_length(fitting: int) -> int:
    return next((n for n in (32, 16, 8, 4) if n <= fitting), max(fitting, 1))


def wrap(grid: Indices, stride: int) -> Indices:
    """Lay a single row of devices out in rows of ``stride``, the last one padded with EMPTY."""
    flat = grid.ravel()
    padding = np.full(-len(flat) % stride, EMPTY)
    return np.concatenate([flat, padding]).reshape(1, 1, -1, stride)


def _fill_bands(blocks: Sequence[Block], block: int, width: int) -> list[list[Block]]:
    """Break a row of blocks into bands no wider than ``width``; an ellipsis is one column wide."""
    if all(b is None for b in blocks):
        return [[None]]
    bands: list[list[Block]] = [[]]
    used = 0
    for item in blocks:
        size = 1 if item is None else block
        if bands[-1] and used + size > width:
            bands.append([])
            used = 0
        bands[-1].append(item)
        used += size + SPACE
    return bands
