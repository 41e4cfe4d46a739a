"""A mesh draws itself in the terminal."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import Mesh
from rich.console import Console

from meshwright.mesh.build import abstract_mesh, build_mesh
from meshwright.mesh.picture import picture_of
from meshwright.mesh.terminal_drawing import MAX_LINES, render_mesh
from meshwright.text.drawing import INK

pytestmark = pytest.mark.quick

LEGEND_LINES = 12

LAYOUTS = [
    {"data": 1},
    {"data": 7},
    {"data": 40},
    {"fsdp": 4, "tensor": 2},
    {"data": 3, "tensor": 8},
    {"pipe": 3, "fsdp": 2, "tensor": 2},
    {"pipe": 2, "data": 2, "fsdp": 2, "tensor": 2},
    {"pipe": 2, "data": 1, "fsdp": 4, "tensor": 1},
]


def drawn(mesh, width=80, **options):
    out = io.StringIO()
    Console(file=out, width=width, **options).print(render_mesh(mesh))
    return out.getvalue()


def cells(text):
    """Everything between two upright lines, line by line."""
    lines = [re.split("[│┃]", line)[1:-1] for line in text.splitlines()]
    return [[cell.strip() for cell in line if cell.strip()] for line in lines if line]


def plain_lines(text):
    return [line.rstrip() for line in text.splitlines()]


def test_one_process():
    assert plain_lines(drawn(build_mesh({"fsdp": 4, "tensor": 2}))) == [
        "fsdp=4 × tensor=2 · 8 devices · cpu",
        "",
        "tensor →   0   1",
        "         ╭───┬───╮",
        "fsdp   0 │ 0 │ 1 │",
        " ↓     1 │ 2 │ 3 │",
        "       2 │ 4 │ 5 │",
        "       3 │ 6 │ 7 │",
        "         ╰───┴───╯",
    ]


def test_heavy_lines_run_between_processes(cluster):
    grid = np.array(cluster(4, 2), dtype=object).reshape(2, 4)
    assert plain_lines(drawn(Mesh(grid, ("fsdp", "tensor")))) == [
        "fsdp=2 × tensor=4 · 8 devices · NVIDIA H200",
        "",
        "tensor →   0   1   2   3",
        "         ┏━━━┯━━━┳━━━┯━━━┓",
        "fsdp   0 ┃ 0 │ 1 ┃ 2 │ 3 ┃",
        "         ┣━━━┿━━━╋━━━┿━━━┫",
        " ↓     1 ┃ 4 │ 5 ┃ 6 │ 7 ┃",
        "         ┗━━━┷━━━┻━━━┷━━━┛",
        "",
        "heavy lines enclose the devices of one process",
        "  process 0: devices 0–1",
        "  process 1: devices 2–3",
        "  process 2: devices 4–5",
        "  process 3: devices 6–7",
    ]


def test_devices_of_several_processes_are_numbered_through(cluster):
    """The ids of CPUs begin with their process."""
    devices = [replace(d, id=2048 * d.process_index + d.id % 2) for d in cluster(2, 2)]
    picture = picture_of(build_mesh({"data": 4}, devices))
    assert picture.ids == [0, 1, 2, 3]
    assert picture.process_devices == {0: "0–1", 1: "2–3"}


def test_outer_axes_make_blocks(cluster):
    mesh = build_mesh({"pipe": 2, "fsdp": 2, "tensor": 2}, cluster(2, 4))
    assert plain_lines(drawn(mesh))[2:9] == [
        "          pipe 0      pipe 1",
        "tensor →   0   1       0   1",
        "         ┏━━━┯━━━┓   ┏━━━┯━━━┓",
        "fsdp   0 ┃ 0 │ 1 ┃   ┃ 4 │ 5 ┃",
        " ↓     1 ┃ 2 │ 3 ┃   ┃ 6 │ 7 ┃",
        "         ┗━━━┷━━━┛   ┗━━━┷━━━┛",
        "",
    ]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_device_has_one_cell(cluster, sizes, width):
    count = int(np.prod(list(sizes.values())))
    text = drawn(build_mesh(sizes, cluster(1, count)), width)
    assert sorted(int(cell) for line in cells(text) for cell in line) == list(range(count))


@pytest.mark.parametrize("sizes", [*LAYOUTS, {"data": 1024}, {"fsdp": 32, "tensor": 32}], ids=str)
@pytest.mark.parametrize("width", [30, 80])
def test_no_line_is_wider_than_the_terminal(cluster, sizes, width):
    count = int(np.prod(list(sizes.values())))
    drawing = drawn(build_mesh(sizes, cluster(1, count)), width).splitlines()
    assert max(len(line) for line in drawing) <= width


def test_axes_of_size_one_are_not_shown(cluster):
    text = drawn(build_mesh({"pipe": 1, "data": 1, "fsdp": 4, "tensor": 2}, cluster(1, 8)))
    assert "pipe" not in text
    assert "data" not in text


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipe": 8, "data": 16, "tensor": 8},
        {"data": 1024},
        {"fsdp": 32, "tensor": 32},
        {"pipe": 4, "data": 4, "fsdp": 8, "tensor": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 128])
def test_large_meshes_show_their_corners(cluster, sizes, processes):
    mesh = build_mesh(sizes, cluster(processes, 1024 // processes))
    text = drawn(mesh)
    shown = {cell for line in cells(text) for cell in line}
    assert {"0", "1023"} <= shown
    assert shown & {"…", "⋮"} or "…" in text
    assert "… and ⋮ stand for coordinates that are not shown" in text
    assert len(text.splitlines()) <= MAX_LINES + LEGEND_LINES


def test_a_described_mesh_says_that_it_has_no_devices():
    text = drawn(abstract_mesh({"fsdp": 4, "tensor": 2}))
    assert "8 devices · described, not present" in text
    assert cells(text) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]


def test_colour_adds_nothing_that_plain_text_lacks(cluster):
    mesh = build_mesh({"fsdp": 4, "tensor": 2}, cluster(2, 4))
    coloured = drawn(mesh, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == drawn(mesh)


def luminance(colour):
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_cells_differ_in_colour_and_their_text_can_be_read(cluster, sizes):
    count = int(np.prod(list(sizes.values())))
    picture = picture_of(build_mesh(sizes, cluster(1, count)))
    colours = [picture.cell(index).fill for index in range(count)]
    assert len(set(colours)) == count
    text = luminance(INK)
    # 4.5 is the contrast that WCAG asks of small text.
    assert min((luminance(c) + 0.05) / (text + 0.05) for c in colours) >= 4.5
