"""A mesh draws itself as SVG."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from jax.sharding import Mesh

from meshwright.mesh.build import abstract_mesh, build_mesh
from meshwright.mesh.svg_drawing import mesh_svg

pytestmark = pytest.mark.quick

SVG = "{http://www.w3.org/2000/svg}"

LAYOUTS = [
    {"data": 1},
    {"data": 40},
    {"fsdp": 4, "tensor": 2},
    {"pipe": 3, "fsdp": 2, "tensor": 2},
    {"pipe": 2, "data": 2, "fsdp": 2, "tensor": 2},
    {"pipe": 8, "data": 16, "tensor": 8},
]


def parsed(mesh):
    return ElementTree.fromstring(mesh_svg(mesh))


def cells(root):
    """Device id → (x, y) of its cell."""
    places = {}
    for group in root.iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect.get("class") == "cell"
        places[int(text.text)] = (float(rect.get("x")), float(rect.get("y")))
    return places


def edges(root):
    """Every straight piece of the process outlines."""
    data = "".join(path.get("d") for path in root.iter(f"{SVG}path"))
    return re.findall(r"M(\S+) (\S+?)([hv])(\d+)", data)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_device_has_one_cell_inside_the_picture(cluster, sizes):
    count = int(np.prod(list(sizes.values())))
    root = parsed(build_mesh(sizes, cluster(1, count)))
    places = cells(root)
    assert sorted(places) == list(range(count))
    assert len(set(places.values())) == count
    _, _, width, height = map(float, root.get("viewBox").split())
    assert all(0 <= x <= width - 44 and 0 <= y <= height - 34 for x, y in places.values())


def test_the_innermost_axis_runs_across_and_the_next_down(cluster):
    places = cells(parsed(build_mesh({"fsdp": 4, "tensor": 2}, cluster(1, 8))))
    assert places[0][1] == places[1][1]
    assert places[0][0] < places[1][0]
    assert places[0][0] == places[2][0]
    assert places[0][1] < places[2][1] < places[4][1] < places[6][1]


def test_more_axes_than_four_are_folded_into_the_outer_blocks(cluster):
    grid = np.array(cluster(1, 32), dtype=object).reshape(2, 2, 2, 2, 2)
    root = parsed(Mesh(grid, tuple("abcde")))
    assert sorted(cells(root)) == list(range(32))
    assert "a·b along outer blocks, c along blocks, d along rows" in root[1].text


def test_one_process_needs_no_outline(cluster):
    assert edges(parsed(build_mesh({"fsdp": 4, "tensor": 2}, cluster(1, 8)))) == []


def test_outlines_enclose_each_process(cluster):
    root = parsed(build_mesh({"fsdp": 4, "tensor": 2}, cluster(2, 4)))
    places = cells(root)
    # Around 4 × 2 cells run 12 edges, and 2 separate the upper half from the lower.
    assert len(edges(root)) == 12 + 2
    between = [
        (float(x), float(y))
        for x, y, direction, _ in edges(root)
        if direction == "h" and places[2][1] < float(y) < places[4][1]
    ]
    assert len(between) == 2
    assert "process 1: devices 4–7" in [text.text for text in root.iter(f"{SVG}text")]


def test_outlines_follow_processes_that_split_columns(cluster):
    grid = np.array(cluster(4, 2), dtype=object).reshape(2, 4)
    root = parsed(Mesh(grid, ("fsdp", "tensor")))
    assert len(edges(root)) == 12 + 4 + 2


def test_a_wrapped_row_is_outlined_along_its_ragged_end(cluster):
    root = parsed(build_mesh({"data": 20}, cluster(2, 10)))
    # 16 + 4 cells: 16 above, 16 below in all, 2 at each side; then between the two processes:
    # one edge after device 9, and four under devices 0 to 3, which process 1 has below.
    assert len(edges(root)) == 16 + 16 + 2 + 2 + 1 + 4


def test_each_cell_tells_its_coordinates_and_process(cluster):
    root = parsed(build_mesh({"fsdp": 4, "tensor": 2}, cluster(2, 4)))
    titles = [group.find(f"{SVG}title").text for group in root.iter(f"{SVG}g")]
    assert titles[5] == "device 5, process 1: fsdp 2, tensor 1"


def test_the_picture_describes_itself(cluster):
    root = parsed(build_mesh({"pipe": 2, "fsdp": 2, "tensor": 2}, cluster(2, 4)))
    assert root.get("role") == "img"
    title, description = root[0], root[1]
    assert (title.tag, description.tag) == (f"{SVG}title", f"{SVG}desc")
    assert title.text == "Mesh pipe=2 × fsdp=2 × tensor=2 · 8 devices · NVIDIA H200"
    assert "pipe along blocks, fsdp along rows, tensor along columns" in description.text
    assert "process 1 owns 4–7" in description.text


def test_the_picture_needs_no_other_file_and_suits_dark_pages():
    text = mesh_svg(abstract_mesh({"fsdp": 4, "tensor": 2}))
    without_namespace = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|@import|url\(|href|<image|<script", without_namespace)
    assert "prefers-color-scheme: dark" in text


def test_axis_names_are_escaped(cluster):
    grid = np.array(cluster(1, 4), dtype=object).reshape(2, 2)
    root = parsed(Mesh(grid, ("a<b", "c&d")))
    assert "a<b=2 × c&d=2" in root[0].text


def test_rows_are_drawn_by_replica_and_part_with_the_devices_that_hold_them():
    mesh = abstract_mesh({"fsdp": 2, "context": 2, "tensor": 2})
    drawn = re.findall(r">([^<]*)</text>", mesh_svg(mesh, (2, 127)))
    first, second = drawn.index("sample 0"), drawn.index("sample 1")
    assert drawn[first:second] == ["sample 0", "0–63", "devices 0–1", "64–126", "devices 4–5"]
    assert drawn[second + 1 :] == ["0–63", "devices 2–3", "64–126", "devices 6–7"]
    large = mesh_svg(abstract_mesh({"data": 16, "context": 16}), (16, 2**17))
    assert "8 of 16 replicas, 8 of 16 parts of a row" in large
