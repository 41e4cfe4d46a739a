"""Drawing which positions of which samples the devices of a context axis hold."""

from __future__ import annotations

import numpy as np

from meshwright.mesh.axes import BATCH_AXES, CONTEXT
from meshwright.mesh.picture import Indices, Picture, id_ranges
from meshwright.text.drawing import MARGIN, SvgPainter

_WIDTH, _HEIGHT, _SPACE, _LABEL, _LINE = 118, 40, 6, 104, 20
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
        x, y = MARGIN + _LABEL + part * (_WIDTH + _SPACE), top + replica * (_HEIGHT + _SPACE)
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
    return MARGIN + _LABEL + shown.shape[1] * (_WIDTH + _SPACE), end + _LINE


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
