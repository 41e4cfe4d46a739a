"""What a drawing of a mesh shows: its devices as cells, laid out in blocks of rows and columns."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshwright.errors import UserError
from meshwright.mesh.axes import describe_sizes, shown_sizes
from meshwright.text.drawing import Cell
from meshwright.text.units import counted

_MAX_LEGEND_LINES = 8

Indices = np.ndarray[Any, np.dtype[np.int64]]
"""Positions of devices in the mesh, counted in row-major order of the coordinates."""

GAP, EMPTY = -1, -2
"""Cells without a device: an ellipsis, or nothing (outside the mesh)."""

BlockAt = tuple[int, int]
"""Coordinates of a block along the two outer axes."""


@dataclass(frozen=True)
class Picture:
    """What is drawn of a mesh, by device in row-major order; its axes are larger than 1."""

    axes: dict[str, int]
    ids: Sequence[int]
    processes: Sequence[int]
    kind: str

    @property
    def headline(self) -> str:
        """One line: ``fsdp=4 × tensor=2 · 8 devices · NVIDIA H200``."""
        parts = [describe_sizes(self.axes)] if self.axes else []
        parts.append(counted(len(self.ids), "device"))
        return " · ".join([*parts, self.kind or "described, not present"])

    @property
    def several_processes(self) -> bool:
        """Whether devices belong to more than one process."""
        return len(set(self.processes)) > 1

    @property
    def process_devices(self) -> dict[int, str]:
        """The device ids of each process, written as ranges."""
        owned: dict[int, list[int]] = {process: [] for process in sorted(set(self.processes))}
        for device, process in zip(self.ids, self.processes, strict=True):
            owned[process].append(device)
        return {process: id_ranges(ids) for process, ids in owned.items()}

    @property
    def legend(self) -> list[str]:
        """One line per process with its devices, shortened; empty for a single process."""
        lines = [f"process {p}: devices {ids}" for p, ids in self.process_devices.items()]
        if len(lines) > _MAX_LEGEND_LINES:
            lines[_MAX_LEGEND_LINES - 2 : -1] = ["⋮"]
        return lines if len(lines) > 1 else []

    def blocks(self) -> tuple[tuple[str, str, str, str], Indices]:
        """Return four axis names ("" in front where there are fewer) and a 4-dim grid of devices.

        The last two dims are the rows and columns of a block; the first two lay the blocks out.
        Axes beyond four are folded into the outermost.
        """
        names, sizes = list(self.axes), list(self.axes.values())
        outer, inner = names[:-3], sizes[-3:]
        padded = ["·".join(outer), *[""] * (3 - len(inner)), *names[-3:]]
        shape = (-1, *[1] * (3 - len(inner)), *inner)
        first, second, rows, columns = padded
        return (first, second, rows, columns), np.arange(len(self.ids)).reshape(shape)

    def cell(self, index: int) -> Cell:
        """Return the cell of a device: its id, its colour, and where it is."""
        places = np.unravel_index(index, tuple(self.axes.values())) if self.axes else ()
        where = ", ".join(f"{axis} {at}" for axis, at in zip(self.axes, places, strict=True))
        about = f"device {self.ids[index]}, process {self.processes[index]}"
        return Cell(
            str(self.ids[index]), self._colour(index), f"{about}{': ' if where else ''}{where}"
        )

    def _colour(self, index: int) -> str:
        """Return ``#rrggbb`` for a device: hue by the outermost axis, lightness by the others.

        All colours are light enough for dark text, so one set serves light and dark backgrounds.
        """
        outer = next(iter(self.axes.values()), 1)
        inner = len(self.ids) // outer
        depth = (index % inner) / max(inner - 1, 1)
        hue = 250.0 + 300.0 * (index // inner) / outer
        return _oklch(0.88 - 0.17 * depth, 0.07 + 0.04 * depth, hue)


@dataclass(frozen=True)
class Layout:
    """The blocks of a drawing, and what is shown of each.

    ``names`` are the axes of the outer blocks, inner blocks, rows and columns, and ``grid`` has
    devices by these four; EMPTY outside the mesh. ``stride`` are devices of the row axis from one
    row to the next (more than 1 if it is wrapped). Visible rows and columns have GAP for an
    ellipsis, and ``bands``, the blocks drawn side by side, None.
    """

    picture: Picture
    names: tuple[str, str, str, str]
    grid: Indices
    stride: int
    rows: Sequence[int]
    columns: Sequence[int]
    bands: Sequence[Sequence[BlockAt | None]]

    @property
    def shows_all(self) -> bool:
        """Whether no coordinate is left out."""
        gap_between_blocks = any(None in band for band in self.bands)
        return not (GAP in self.rows or GAP in self.columns or gap_between_blocks)

    @property
    def row_labels(self) -> list[str]:
        """The coordinate of each visible row."""
        return ["⋮" if row == GAP else str(row * self.stride) for row in self.rows]

    @property
    def column_labels(self) -> list[str]:
        """The coordinate of each visible column."""
        return ["…" if column == GAP else str(column) for column in self.columns]

    def title(self, block: BlockAt) -> str:
        """Return ``pipe 0 · data 1`` for a block; empty when there is only one."""
        return " · ".join(f"{n} {i}" for n, i in zip(self.names[:2], block, strict=True) if n)

    def devices(self, block: BlockAt) -> Indices:
        """Return the shown devices of a block by row and column, GAP and EMPTY included."""
        rows, columns = np.array(self.rows), np.array(self.columns)
        shown = self.grid[block][np.ix_(rows, columns)]
        return np.where((rows == GAP)[:, None] | (columns == GAP), GAP, shown)

    def owners(self, block: BlockAt) -> Indices:
        """Return the process of each shown device, with a rim of EMPTY around the block."""
        known = np.append(self.picture.processes, [EMPTY, GAP])  # indexed by EMPTY and GAP too
        return np.pad(known[self.devices(block)], 1, constant_values=EMPTY)


def wrap(grid: Indices, stride: int) -> Indices:
    """Lay a single row of devices out in rows of ``stride``, the last one padded with EMPTY."""
    flat = grid.ravel()
    padding = np.full(-len(flat) % stride, EMPTY)
    return np.concatenate([flat, padding]).reshape(1, 1, -1, stride)


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise UserError(
            f"the mesh is {mesh!r:.60}, of type {type(mesh).__name__}",
            fix='write a mesh, such as mw.build_mesh({"fsdp": 8})',
        )


def picture_of(mesh: Mesh | AbstractMesh) -> Picture:
    """Return what a drawing of ``mesh`` shows; an abstract mesh numbers its devices in order."""
    _check_mesh(mesh)
    axes = shown_sizes(dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
    if isinstance(mesh, AbstractMesh):
        return Picture(axes, range(mesh.size), [0] * mesh.size, kind="")
    devices = mesh.devices.ravel().tolist()
    return Picture(
        axes,
        ids=device_numbers(devices),
        processes=[int(device.process_index) for device in devices],
        kind=" and ".join(sorted({str(device.device_kind) for device in devices})),
    )


def device_numbers(devices: Sequence[Any]) -> list[int]:
    """Return the numbers of devices: their ids, or their places among the devices of all processes.

    The ids of CPUs in several processes begin with the process: 0, 1, 2048, 2049.
    """
    client = getattr(devices[0], "client", None)
    everywhere = devices if client is None else client.devices()
    if len({device.process_index for device in everywhere}) == 1:
        return [int(device.id) for device in devices]
    places = {id: n for n, id in enumerate(sorted(device.id for device in everywhere))}
    return [places[device.id] for device in devices]


def id_ranges(ids: Iterable[int]) -> str:
    """Return ids as ranges: ``0–3, 8``."""
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """Convert OKLCH, in which equal steps look equal, to an sRGB hex colour."""
    a = chroma * math.cos(math.radians(hue))
    b = chroma * math.sin(math.radians(hue))
    lms = np.array([[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728],
                    [1, -0.0894841775, -1.2914855480]]) @ [lightness, a, b]  # fmt: skip
    linear = np.array([[4.0767416621, -3.3077115913, 0.2309699292],
                       [-1.2684380046, 2.6097574011, -0.3413193965],
                       [-0.0041960863, -0.7034186147, 1.7076147010]]) @ lms**3  # fmt: skip
    linear = np.clip(linear, 0.0, 1.0)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(float(channel) * 255):02x}" for channel in srgb)
