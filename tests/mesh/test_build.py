"""Which device sits at which coordinate."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.config import DistributedConfig
from meshwright.distributed import DeviceMeshManager
from meshwright.errors import UserError
from meshwright.mesh.build import (
    abstract_mesh,
    arrange_mesh,
    build_mesh,
    check_same_kind,
    split_across,
)

pytestmark = pytest.mark.quick


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices)


def owners(mesh):
    return np.vectorize(lambda device: device.process_index)(mesh.devices)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 8},
        {"fsdp": 4, "tensor": 2},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"pipe": 2, "data": 1, "fsdp": 2, "tensor": 2},
    ],
)
def test_meshes_of_one_to_four_axes_use_every_device_once(sizes):
    mesh = build_mesh(sizes)
    assert dict(mesh.shape) == sizes
    assert sorted(ids(mesh).ravel()) == [device.id for device in jax.devices()]
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_tensor_neighbours_are_adjacent_devices_whatever_the_order_asked():
    for sizes in ({"fsdp": 4, "tensor": 2}, {"tensor": 2, "fsdp": 4}):
        assert ids(build_mesh(sizes)).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("build", "spec", "parts"),
    [
        (lambda: build_mesh({"data": 2, "model": 4}), P("data", "model"), (2, 4)),
        (lambda: build_mesh({"tp": 2, "dp": -1}), P(("dp", "tp")), (8, 1)),
        (lambda: DeviceMeshManager().create_hybrid_mesh(2, 4), P("data", "model"), (2, 4)),
        (
            lambda: DeviceMeshManager().create_device_mesh(
                DistributedConfig(mesh_shape=(2, 4), mesh_axis_names=("dp", "mp")).mesh_sizes()
            ),
            P("mp", "dp"),
            (4, 2),
        ),
    ],
)
def test_an_axis_keeps_the_alias_it_was_given_by(build, spec, parts):
    x = np.arange(64.0).reshape(8, 8)
    placed = jax.device_put(x, NamedSharding(build(), spec))
    assert placed.addressable_shards[0].data.shape == (8 // parts[0], 8 // parts[1])
    np.testing.assert_array_equal(placed, x)


def test_an_abstract_mesh_keeps_aliases_too():
    assert dict(abstract_mesh({"model": 4, "data": 2}).shape) == {"data": 2, "model": 4}


def test_an_arranged_mesh_keeps_names_and_order_and_still_puts_tensor_on_adjacent_devices():
    mesh = arrange_mesh({"tp": 2, "batch": 4}, jax.devices())
    assert mesh.axis_names == ("tp", "batch")
    assert ids(mesh).T.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_stages_take_consecutive_devices(cluster):
    mesh = build_mesh({"pipe": 4, "tensor": 8}, cluster(1, 32))
    assert ids(mesh)[0].tolist() == list(range(8))
    assert ids(mesh).tolist() == np.arange(32).reshape(4, 8).tolist()


def test_a_subset_of_the_devices_makes_a_mesh():
    mesh = build_mesh({"fsdp": 2}, jax.devices()[2:6])
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2}
    assert sorted(ids(mesh).ravel()) == [2, 3, 4, 5]


def test_a_thousand_devices_can_be_described():
    mesh = abstract_mesh({"pipe": 8, "tensor": 8, "data": 16})
    assert dict(mesh.shape) == {"pipe": 8, "data": 16, "tensor": 8}
    assert mesh.size == 1024
    assert dict(abstract_mesh({"tensor": 8}, 1024).shape) == {"data": 128, "tensor": 8}


def test_a_described_mesh_of_unknown_size_cannot_infer_an_axis():
    with pytest.raises(UserError):
        abstract_mesh({"fsdp": -1, "tensor": 2})


def test_no_devices_make_no_mesh():
    with pytest.raises(UserError):
        build_mesh({"fsdp": 4}, [])


def test_a_wrong_product_is_refused_with_the_equation():
    with pytest.raises(UserError, match="data=3 × tensor=2 = 6, not 8"):
        build_mesh({"data": 3, "tensor": 2})


def test_mixed_kinds_are_refused_by_name(cluster):
    mixed = [*cluster(1, 6), *cluster(1, 2, device_kind="NVIDIA A100")]
    with pytest.raises(UserError, match="2 × NVIDIA A100, 6 × NVIDIA H200") as caught:
        build_mesh({"data": 8}, mixed)
    assert "only the 6 NVIDIA H200" in caught.value.fix
    assert check_same_kind(cluster(2, 4)) is None


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    ("processes", "each", "sizes"),
    [
        (2, 4, {"fsdp": 2, "tensor": 4}),
        (4, 8, {"pipe": 2, "data": 2, "fsdp": 2, "tensor": 4}),
        (8, 8, {"fsdp": 8, "tensor": 8}),
        (3, 4, {"data": 6, "tensor": 2}),
    ],
)
def test_tensor_stays_within_a_process_when_it_fits(cluster, processes, each, sizes, shuffled):
    devices = cluster(processes, each)
    if shuffled:
        np.random.default_rng(0).shuffle(devices)
    mesh = build_mesh(sizes, devices)
    by_tensor_group = owners(mesh).reshape(-1, sizes["tensor"])
    assert all(len(set(group)) == 1 for group in by_tensor_group.tolist())
    assert sorted(ids(mesh).ravel()) == list(range(processes * each))


def test_machines_of_different_size_keep_each_process_together(cluster):
    uneven = cluster(2, 4)[:6]
    mesh = build_mesh({"fsdp": 3, "tensor": 2}, uneven)
    assert owners(mesh).tolist() == [[0, 0], [0, 0], [1, 1]]


def test_slices_are_split_over_the_outermost_axis(tpu_slices):
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2}, tpu_slices(2))
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert slices.reshape(2, 4).tolist() == [[0] * 4, [1] * 4]


def test_one_slice_over_several_processes_is_one_unit(cluster):
    mesh = build_mesh({"fsdp": 2, "tensor": 4}, cluster(4, 2, slice_index=0))
    assert ids(mesh).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4), st.integers(1, 16))
def test_machines_are_split_over_axes_exactly_when_they_divide_the_mesh(shape, machines):
    across = split_across(shape, machines)
    assert (across is not None) == (np.prod(shape) % machines == 0)
    if across is not None:
        assert np.prod(across) == machines
        assert all(size % share == 0 for size, share in zip(shape, across, strict=True))
