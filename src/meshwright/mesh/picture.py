"""What a drawing of a mesh shows: its axes, and the device, process and colour of each cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshwright.errors import UserError
from meshwright.mesh.axes import describe_sizes, shown_sizes
from meshwright.text.units import counted

_MAX_LEGEND_LINES = 8

Indices = np.ndarray[Any, np.dtype[np.int64]]
"""Positions of devices in the mesh, counted in row-major order of the coordinates."""


@dataclass(frozen=True)
class Picture:
    """A mesh reduced to what is drawn; devices are listed in row-major order of the coordinates.

    Attributes:
        axes: the axes larger than 1, outermost first, with their sizes.
        ids: the id of each device.
        processes: the process that owns each device.
        kind: the kind of the devices; empty for an abstract mesh.
    """

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

    def coordinate(self, index: int) -> dict[str, int]:
        """Return the coordinate of a device along each axis."""
        where = np.unravel_index(index, tuple(self.axes.values())) if self.axes else ()
        return {axis: int(place) for axis, place in zip(self.axes, where, strict=True)}

    def colour(self, index: int) -> str:
        """Return ``#rrggbb`` for a device: hue by the outermost axis, lightness by the others.

        All colours are light enough for dark text, so one set serves light and dark backgrounds.
        """
        outer = next(iter(self.axes.values()), 1)
        inner = len(self.ids) // outer
        depth = (index % inner) / max(inner - 1, 1)
        hue = 250.0 + 300.0 * (index // inner) / outer
        return _oklch(0.88 - 0.17 * depth, 0.07 + 0.04 * depth, hue)


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
    kinds = sorted({str(device.device_kind) for device in devices})
    return Picture(
        axes,
        ids=[int(device.id) for device in devices],
        processes=[int(device.process_index) for device in devices],
        kind=" and ".join(kinds),
    )


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
