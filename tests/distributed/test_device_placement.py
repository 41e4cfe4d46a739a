"""DevicePlacement: placing, prefetching and batch-size advice."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from meshwright.distributed import (
    BatchSizeRecommendation,
    DeviceMeshManager,
    DevicePlacement,
    HardwareType,
    distribute_batch,
    get_batch_size_recommendation,
    place_on_device,
)
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def placement():
    return DevicePlacement()


@pytest.fixture(scope="module")
def mesh():
    return DeviceMeshManager().create_hybrid_mesh(4, 2)


def shard_shapes(array):
    return {shard.data.shape for shard in array.addressable_shards}


def test_default_device_is_the_first(placement):
    assert placement.default_device == jax.devices()[0]
    assert placement.num_devices == 8
    assert placement.hardware_type is HardwareType.CPU


def test_places_on_the_default_or_a_given_device(placement):
    tree = {"a": np.ones(3), "b": 2.0}
    assert placement.place_on_device(tree)["a"].devices() == {jax.devices()[0]}
    third = jax.devices()[3]
    assert placement.place_on_device(tree, third)["b"].devices() == {third}
    assert DevicePlacement(third).place_on_device(tree)["a"].devices() == {third}


def test_distributes_like_data_parallel(placement, mesh):
    out = placement.distribute_batch({"x": np.ones((8, 3)), "n": 1}, NamedSharding(mesh, P("data")))
    assert shard_shapes(out["x"]) == {(2, 3)}
    assert out["n"].sharding.is_fully_replicated


def test_distributes_over_other_kinds_of_sharding(placement):
    device = jax.devices()[5]
    out = placement.distribute_batch(np.ones(3), SingleDeviceSharding(device))
    assert out.devices() == {device}


def test_replicates_over_a_mesh_or_everywhere(placement):
    half = DeviceMeshManager().create_data_parallel_mesh(4)
    assert len(placement.replicate_across_devices(np.ones(3), half).sharding.device_set) == 4
    everywhere = placement.replicate_across_devices({"w": np.ones(3)})["w"]
    assert everywhere.sharding.is_fully_replicated
    assert len(everywhere.sharding.device_set) == 8


@pytest.mark.parametrize("batch_axis", [1, -2])
def test_shards_the_batch_dim_that_is_named(placement, mesh, batch_axis):
    data = {"frames": np.arange(24.0).reshape(1, 8, 3), "rate": 0.5}
    out = placement.shard_batch_dim(data, mesh, batch_axis=batch_axis)
    assert shard_shapes(out["frames"]) == {(1, 2, 3)}
    assert out["rate"].sharding.is_fully_replicated
    np.testing.assert_array_equal(out["frames"], data["frames"])


def test_shards_over_the_mesh_axis_that_is_named(placement, mesh):
    out = placement.shard_batch_dim(np.ones((8, 3)), mesh, mesh_axis="model")
    assert shard_shapes(out) == {(4, 3)}


def test_shard_batch_dim_names_what_does_not_fit(placement, mesh):
    with pytest.raises(UserError, match=r"\['y'\] has no dim 1"):
        placement.shard_batch_dim({"x": np.ones((2, 8)), "y": np.ones(8)}, mesh, batch_axis=1)
    with pytest.raises(UserError, match="6 is not divisible by 4"):
        placement.shard_batch_dim(np.ones((6, 3)), mesh)
    with pytest.raises(UserError, match="no axis `batch`"):
        placement.shard_batch_dim(np.ones((8, 3)), mesh, mesh_axis="batch")


def test_prefetches_to_a_device_and_over_a_sharding(placement, mesh):
    batches = [{"x": np.full((8, 2), i)} for i in range(4)]
    third = jax.devices()[3]
    out = list(placement.prefetch_to_device(batches, third))
    assert [int(batch["x"][0, 0]) for batch in out] == [0, 1, 2, 3]
    assert out[0]["x"].devices() == {third}
    spread = list(placement.prefetch_to_device(batches, NamedSharding(mesh, P("data"))))
    assert shard_shapes(spread[0]["x"]) == {(2, 2)}


def test_prefetch_uses_the_default_device(placement):
    (only,) = placement.prefetch_to_device([np.ones(2)], buffer_size=1)
    assert only.devices() == {jax.devices()[0]}


def test_prefetch_placement_error_reaches_the_consumer(placement, mesh):
    stream = placement.prefetch_to_device([np.ones(7)], NamedSharding(mesh, P("data")))
    with pytest.raises(UserError, match="not divisible"):
        next(stream)


def test_prefetch_needs_a_buffer(placement):
    with pytest.raises(UserError, match="buffer_size=0"):
        placement.prefetch_to_device(itertools.count(), buffer_size=0)


def test_recommendation_for_here_and_elsewhere(placement):
    here = placement.get_batch_size_recommendation()
    assert isinstance(here, BatchSizeRecommendation)
    assert here.critical_batch_size == 16
    assert placement.get_batch_size_recommendation(HardwareType.H100).critical_batch_size == 298
    with pytest.raises(AttributeError):
        here.min_batch_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("size", "valid", "message"),
    [
        (0, False, "below minimum 1"),
        (8, True, "below critical size 16"),
        (12, False, "not divisible by the 8 devices; below critical size 16"),
        (36, False, "not divisible by the 8 devices"),
        (64, True, "fine for cpu"),
    ],
)
def test_batch_size_verdicts(placement, size, valid, message):
    verdict, text = placement.validate_batch_size(size)
    assert verdict is valid
    assert message in text


def test_suboptimal_size_is_not_mentioned_unless_asked(placement):
    assert placement.validate_batch_size(8, warn_suboptimal=False) == (
        True,
        "batch size 8 is fine for cpu",
    )


def test_device_info_is_complete_and_json(placement):
    info = json.loads(json.dumps(placement.get_device_info()))
    assert info["num_devices"] == len(info["devices"]) == 8
    assert info["hardware_type"] == "cpu"
    assert info["platforms"] == ["cpu"]
    assert info["device_kinds"] == ["cpu"]
    assert info["devices"][3]["id"] == 3


def test_keeps_dtypes_of_host_data(placement, mesh):
    out = placement.distribute_batch(np.ones(8, np.int8), NamedSharding(mesh, P("data")))
    assert out.dtype == jnp.int8


def test_recommendations_take_a_type_of_hardware(placement):
    sizes = placement.get_batch_size_recommendation(hardware_type=HardwareType.H100)
    assert sizes.critical_batch_size == 298
    assert sizes.max_memory_batch_size is None
    assert placement.get_batch_size_recommendation(hardware=HardwareType.H100) == sizes
    assert get_batch_size_recommendation(HardwareType.H100) == sizes
    assert get_batch_size_recommendation() == HardwareType.CPU.batch_sizes


def test_a_recommendation_records_the_largest_size_that_fits():
    sizes = BatchSizeRecommendation(
        min_batch_size=32,
        optimal_batch_size=256,
        critical_batch_size=240,
        max_memory_batch_size=512,
        notes="measured",
    )
    assert (sizes.max_memory_batch_size, sizes.notes) == (512, "measured")


def test_data_is_replicated_on_the_devices_that_are_named(placement, mesh):
    data, two = np.arange(6.0), jax.devices()[2:4]
    for copies in (
        placement.replicate_across_devices(data, devices=two),
        placement.replicate_across_devices(data, two),
    ):
        assert copies.sharding.device_set == set(two)
        assert copies.sharding.is_fully_replicated
        np.testing.assert_array_equal(copies, data)
    on_mesh = placement.replicate_across_devices(data, mesh=mesh)
    assert on_mesh.sharding.device_set == set(jax.devices())
    with pytest.raises(UserError, match="empty"):
        placement.replicate_across_devices(data, devices=[])


def test_functions_do_what_the_methods_do(placement, mesh):
    sharding = NamedSharding(mesh, P("data"))
    for batch in (
        distribute_batch(np.arange(8.0), sharding),
        placement.distribute_batch(data=np.arange(8.0), sharding=sharding),
        placement.distribute_batch(batch=np.arange(8.0), sharding=sharding),
    ):
        assert batch.sharding == sharding
        np.testing.assert_array_equal(batch, np.arange(8.0))
    device = jax.devices()[3]
    assert place_on_device({"w": np.ones(2)}, device)["w"].devices() == {device}
    assert place_on_device(np.ones(2)).devices() == {jax.devices()[0]}


@pytest.mark.parametrize("keyword", ["data_iterator", "iterator"])
def test_prefetching_takes_its_iterator_by_keyword(placement, keyword):
    items = placement.prefetch_to_device(**{keyword: iter([np.ones(2), np.zeros(2)])})
    assert [float(item[0]) for item in items] == [1.0, 0.0]
