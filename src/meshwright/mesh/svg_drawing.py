"""Drawing a mesh as a self-contained SVG for documents and reports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshwright.mesh.picture import Indices, Picture, picture_of
from meshwright.mesh.terminal_layout import EMPTY, wrap

# All lengths are in SVG user units, shown as pixels.
_CELL_WIDTH, _CELL_HEIGHT, _CELL_SPACE = 44, 34, 6
_ACROSS, _DOWN = _CELL_WIDTH + _CELL_SPACE, _CELL_HEIGHT + _CELL_SPACE
_BLOCK_SPACE = 34
_MARGIN = 24
_LINE = 20
_LABEL = 54
_MAX_TITLE_WIDTH = 150
_MAX_ROW_LENGTH = 16

_STYLE = """
.mw-mesh text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.mw-mesh .head { font-size: 16px; font-weight: 600; fill: #1f2328; }
.mw-mesh .axis { font-size: 13px; font-weight: 600; fill: #1f2328; }
.mw-mesh .at { font-size: 12px; fill: #59636e; }
.mw-mesh .id { font-size: 14px; font-weight: 600; fill: #16181d; }
.mw-mesh .long { font-size: 11.5px; }
.mw-mesh .own { font-size: 9px; fill: #16181d; fill-opacity: .72; }
.mw-mesh .at, .mw-mesh .id, .mw-mesh .own { font-variant-numeric: tabular-nums; }
.mw-mesh .mid { text-anchor: middle; }
.mw-mesh .end { text-anchor: end; }
.mw-mesh .process { fill: none; stroke: #1f2328; stroke-width: 2.5; stroke-linecap: round; }
@media (prefers-color-scheme: dark) {
.mw-mesh .head, .mw-mesh .axis { fill: #f0f6fc; }
.mw-mesh .at { fill: #9198a1; }
.mw-mesh .process { stroke: #f0f6fc; }
}
"""


def mesh_svg(mesh: Mesh | AbstractMesh) -> str:
    """Return an SVG drawing of a mesh: one cell per device, an outline around each process.

    The drawing suits light and dark pages, and shows each device's coordinates and process on
    hover.
    """
    return _Drawing.of(picture_of(mesh)).svg()


@dataclass(frozen=True)
class _Drawing:
    """A picture and where its blocks go.

    Attributes:
        picture: what is drawn.
        names: axis names of the outer blocks, inner blocks, rows and columns ("" if there is none).
        grid: devices by (outer block, inner block, row, column); EMPTY outside the mesh.
        stride: devices of the row axis from one row to the next (more than 1 if it is wrapped).
        per_band: blocks side by side.
    """

    picture: Picture
    names: tuple[str, str, str, str]
    grid: Indices
    stride: int
    per_band: int

    @classmethod
    def of(cls, picture: Picture) -> _Drawing:
        names, grid = picture.blocks()
        stride = 1
        if len(picture.axes) == 1 and grid.shape[3] > _MAX_ROW_LENGTH:
            stride = _MAX_ROW_LENGTH
            names, grid = ("", "", names[3], ""), wrap(grid, stride)
        drawing = cls(picture, names, grid, stride, per_band=grid.shape[1])
        return drawing if names[0] else replace(drawing, per_band=drawing.balanced_band())

    def balanced_band(self) -> int:
        """Return the number of blocks side by side that brings the drawing nearest to 3:2."""
        count, (across, down) = self.grid.shape[1], self.pitch
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        return min(divisors, key=lambda n: abs(math.log(n * across / (count // n * down) / 1.5)))

    @property
    def several_processes(self) -> bool:
        return len(set(self.picture.processes)) > 1

    @property
    def left(self) -> int:
        """Where the first block starts: after the name and coordinates of the row axis."""
        return _MARGIN + (_LABEL if self.names[2] else 0)

    @property
    def head(self) -> int:
        """Height above a block's cells: its title, the column axis and its coordinates."""
        return _LINE * (bool(self.names[1]) + 2 * bool(self.names[3]))

    @property
    def pitch(self) -> tuple[int, int]:
        """Distance from one block to the next, across and down."""
        _, _, rows, columns = self.grid.shape
        across = max(columns * _ACROSS, _MAX_TITLE_WIDTH if self.names[0] else 0)
        return across + _BLOCK_SPACE, rows * _DOWN + self.head + _BLOCK_SPACE

    @property
    def num_bands(self) -> int:
        return self.grid.shape[0] * -(-self.grid.shape[1] // self.per_band)

    def origin(self, block: tuple[int, int]) -> tuple[int, int]:
        """Return the corner of a block's first cell."""
        outer, inner = block
        band = outer * (self.num_bands // self.grid.shape[0]) + inner // self.per_band
        across, down = self.pitch
        top = _MARGIN + 2 * _LINE + self.head
        return self.left + inner % self.per_band * across, top + band * down

    def svg(self) -> str:
        across, down = self.pitch
        legend = self.legend()
        end = _MARGIN + 2 * _LINE + self.num_bands * down
        # Readers have different fonts; these are the widths of a wide one.
        text_width = max(11 * len(self.picture.headline), *(7 * len(line) for line in legend), 0)
        width = _MARGIN + max(self.left + self.per_band * across - _BLOCK_SPACE, text_width)
        height = end + len(legend) * _LINE
        headline = escape(self.picture.headline)
        blocks = [(a, b) for a in range(self.grid.shape[0]) for b in range(self.grid.shape[1])]
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mw-mesh" role="img" '
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f"<title>Mesh {headline}</title>",
            f"<desc>{escape(self.description())}</desc>",
            f"<style>{_STYLE}</style>",
            _text(_MARGIN, _MARGIN + 10, self.picture.headline, "head"),
            *(line for block in blocks for line in self.block(block)),
            *(_text(_MARGIN, end + i * _LINE, line, "at") for i, line in enumerate(legend)),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def description(self) -> str:
        named = [name for name in self.names if name]
        roles = ["outer blocks", "blocks", "rows", "columns"][4 - len(self.picture.axes) :]
        if self.stride > 1:
            roles = [f"rows of {self.stride}"]
        layout = ", ".join(f"{axis} along {role}" for axis, role in zip(named, roles, strict=True))
        owned = "; ".join(f"process {p} owns {i}" for p, i in self.picture.process_devices.items())
        return f"One cell per device{': ' if layout else ''}{layout}. Devices by process: {owned}."

    def legend(self) -> list[str]:
        lines = self.picture.legend
        return ["outlines enclose the devices of one process (p)", *lines] if lines else []

    def block(self, block: tuple[int, int]) -> Iterator[str]:
        """Draw one block: its labels, its cells and the outlines of its processes."""
        left, top = self.origin(block)
        shown = self.grid[block]
        yield from self.labels(block, left, top)
        for (row, column), index in np.ndenumerate(shown):
            if index != EMPTY:
                yield self.cell(int(index), left + column * _ACROSS, top + row * _DOWN)
        if self.several_processes:
            yield f'<path class="process" d="{self.outlines(shown, left, top)}"/>'

    def cell(self, index: int, x: int, y: int) -> str:
        picture, middle = self.picture, x + _CELL_WIDTH / 2
        process = picture.processes[index]
        where = ", ".join(f"{axis} {at}" for axis, at in picture.coordinate(index).items())
        about = f"device {picture.ids[index]}, process {process}{': ' if where else ''}{where}"
        below = self.several_processes
        own = _text(middle, y + 28, f"p{process}", "own mid") if below else ""
        number = str(picture.ids[index])
        size = "id long" if max(picture.ids) > 999 else "id"
        return (
            f"<g><title>{escape(about)}</title>"
            f'<rect class="cell" x="{x}" y="{y}" width="{_CELL_WIDTH}" height="{_CELL_HEIGHT}" '
            f'rx="6" fill="{picture.colour(index)}"/>'
            f"{_text(middle, y + (17 if below else 22), number, f'{size} mid')}{own}</g>"
        )

    def labels(self, block: tuple[int, int], left: int, top: int) -> Iterator[str]:
        outer, inner, row_axis, column_axis = self.names
        titles = [f"{name} {at}" for name, at in zip((outer, inner), block, strict=True) if name]
        if titles:
            yield _text(left, top - self.head + 6, " · ".join(titles), "axis")
        _, _, rows, columns = self.grid.shape
        if column_axis:
            middle = left + (columns * _ACROSS - _CELL_SPACE) / 2
            yield _text(middle, top - _LINE - 8, f"{column_axis} →", "axis mid")
            for column in range(columns):
                x = left + column * _ACROSS + _CELL_WIDTH / 2
                yield _text(x, top - 9, str(column), "at mid")
        if row_axis and left == self.left:
            x, y = left - _LABEL + 12, top + (rows * _DOWN - _CELL_SPACE) / 2
            yield _text(x, y, f"← {row_axis}", "axis mid", f'transform="rotate(-90 {x} {y})"')
            for row in range(rows):
                y = top + row * _DOWN + _CELL_HEIGHT / 2 + 4
                yield _text(left - 12, y, str(row * self.stride), "at end")

    def outlines(self, shown: Indices, left: int, top: int) -> str:
        """Return path data for the lines between cells of different processes."""
        owner = np.append(self.picture.processes, EMPTY)  # EMPTY, like -1, finds the last
        rim = np.pad(owner[np.maximum(shown, -1)], 1, constant_values=EMPTY)
        left, top = left - _CELL_SPACE // 2, top - _CELL_SPACE // 2
        upright = np.argwhere(rim[1:-1, :-1] != rim[1:-1, 1:])
        level = np.argwhere(rim[:-1, 1:-1] != rim[1:, 1:-1])
        parts = [f"M{left + c * _ACROSS} {top + r * _DOWN}v{_DOWN}" for r, c in upright]
        parts += [f"M{left + c * _ACROSS} {top + r * _DOWN}h{_ACROSS}" for r, c in level]
        return "".join(parts)


def _text(x: float, y: float, text: str, style: str, extra: str = "") -> str:
    attributes = f'x="{x:g}" y="{y:g}" class="{style}" {extra}'.rstrip()
    return f"<text {attributes}>{escape(text)}</text>"
