"""How axes lie on nodes and on tori, against the mesh that is built and against known shapes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.hardware import load_chips
from meshwright.mesh.build import arrange_mesh
from meshwright.planner.devices.links import inside_links, split_over_nodes, torus_shape


def fake_devices(count, nodes):
    per_node = count // nodes
    return [
        SimpleNamespace(id=i, process_index=i // per_node, platform="gpu", device_kind="x")
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ((16,), 2),
        ((2, 8), 2),
        ((4, 4), 2),
        ((2, 2, 2, 2), 4),
        ((4, 2, 2), 2),
        ((2, 16), 4),
        ((6, 2, 2), 4),
        ((8, 3), 3),
        ((4, 6), 3),
        ((2, 3), 1),
    ],
)
def test_axes_span_the_nodes_they_span_in_the_mesh_that_is_built(sizes, nodes, monkeypatch):
    names = ("pipe", "data", "fsdp", "tensor")[-len(sizes) :]
    devices = fake_devices(math.prod(sizes), nodes)
    grids = []
    monkeypatch.setattr(
        "meshwright.mesh.build.Mesh", lambda grid, *_, **__: grids.append(grid) or grid
    )
    arrange_mesh(dict(zip(names, sizes, strict=True)), devices)
    node = np.vectorize(lambda device: device.process_index)(grids[0])
    for axis, (inside, spanned) in enumerate(split_over_nodes(sizes, nodes)):
        groups = np.moveaxis(node, axis, -1).reshape(-1, sizes[axis])
        assert spanned == max(len(set(group)) for group in groups)
        assert inside == max(sizes[axis] // spanned, 1)


@pytest.mark.parametrize(
    ("chips", "dims", "shape"),
    [
        (256, 2, [16, 16]),
        (8, 2, [2, 4]),
        (64, 3, [4, 4, 4]),
        (128, 3, [4, 4, 8]),
        (1, 3, [1, 1, 1]),
        (12, 2, [3, 4]),
        (7, 2, [1, 7]),
    ],
)
def test_tori_are_nearly_cubes(chips, dims, shape):
    assert torus_shape(chips, dims) == shape


def test_a_torus_gives_whole_dims_both_directions():
    v5e, v5p = load_chips()["TPU-v5e"], load_chips()["TPU-v5p"]
    assert [on.links for on in inside_links([256], v5e)] == [4]
    assert [on.links for on in inside_links([16, 16], v5e)] == [2, 2]
    # 8 x 8 has no wraparound, so that the ends of a row have one link.
    assert [on.links for on in inside_links([8, 8], v5e)] == [1, 1]
    assert [on.links for on in inside_links([64], v5p)] == [6]
    assert [on.links for on in inside_links([4, 4, 4], v5p)] == [2, 2, 2]
    assert inside_links([2, 32], v5p)[0].links == 1


def test_two_devices_of_a_chip_need_no_link():
    fsdp, tensor = inside_links([4, 2], load_chips()["TPU7x"])
    assert (tensor.links, tensor.pair) == (6, 6)
    assert (fsdp.links, fsdp.pair) == (2, 1)


def test_point_to_point_links_serve_only_the_pairs_they_join():
    chip = load_chips()["MI300X"]
    assert [inside_links([size], chip)[0].links for size in (2, 4, 8)] == [1, 3, 7]
    assert inside_links([8], load_chips()["V100-32GB"])[0].links == 6
    assert inside_links([2], load_chips()["H100"])[0].links == 18
