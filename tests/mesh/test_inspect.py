"""Where arrays live, told and returned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.mesh.build import abstract_mesh, build_mesh
from meshwright.mesh.inspect import inspect_sharding, visualize_mesh

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def mesh():
    return build_mesh({"fsdp": 4, "tensor": 2})


def place(mesh, shape, *spec, dtype=jnp.float32):
    return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize(
    "spec",
    [
        (),
        ("fsdp",),
        (None, "tensor"),
        ("fsdp", "tensor"),
        (("fsdp", "tensor"), None),
    ],
    ids=str,
)
def test_an_array_agrees_with_its_shards(mesh, spec):
    array = place(mesh, (16, 8), *spec, dtype=jnp.bfloat16)
    record = inspect_sharding(array, "kernel")
    shards = array.addressable_shards
    assert (record.path, record.shape, record.dtype) == ("kernel", (16, 8), "bfloat16")
    assert record.shard_shape == shards[0].data.shape
    assert record.bytes_per_device == shards[0].data.nbytes
    assert record.replicas == 1 + max(shard.replica_id for shard in shards)
    assert record.devices == tuple(range(8))
    assert record.total_bytes == array.nbytes
    assert record.mesh == "fsdp=4 × tensor=2"


def test_an_array_is_told_in_words(mesh, capsys):
    record = inspect_sharding(place(mesh, (512, 256), "fsdp"), "kernel")
    assert record.spec == "P('fsdp')"
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "kernel float32[512, 256] · 524.3 kB",
        "layout P('fsdp') on fsdp=4 × tensor=2",
        "devices 8 (0–7): 4 parts, 2 copies each",
        "one holds [128, 256], 131.1 kB",
    ]


def test_an_array_on_one_device():
    record = inspect_sharding(jax.device_put(jnp.ones(3), jax.devices()[5]))
    assert (record.spec, record.devices, record.replicas) == ("one device", (5,), 1)
    assert record.shard_shape == record.shape == (3,)


@pytest.mark.parametrize(
    ("value", "shape", "dtype", "size"),
    [
        (np.ones((2, 3), np.float32), (2, 3), "float32", 24),
        (np.float16(1), (), "float16", 2),
        (3.0, (), "float64", 8),
        (True, (), "bool", 1),
    ],
    ids=str,
)
def test_values_outside_jax_live_on_the_host(value, shape, dtype, size):
    record = inspect_sharding(value)
    assert (record.shape, record.dtype, record.bytes_per_device) == (shape, dtype, size)
    assert (record.spec, record.devices, record.replicas) == ("host", (), 1)


def test_a_tree_gives_one_record_per_array(mesh, capsys):
    tree = {"w": place(mesh, (8, 4), "fsdp"), "rest": [1, np.zeros(2, np.int8)]}
    records = inspect_sharding(tree, "my tree")
    assert [r.path for r in records] == ["rest.0", "rest.1", "w"]
    assert [r.bytes_per_device for r in records] == [8, 2, 32]
    told = capsys.readouterr().out
    assert told.startswith("my tree\n")
    assert "3 arrays: 138 bytes in all, at most 32 bytes on one device" in told


class Tied(nnx.Module):
    """A model that uses one array twice."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.head = self.embed


def test_a_model_is_listed_by_path_and_shared_weights_once(mesh):
    model = Tied(nnx.Rngs(0))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    model.blocks[0].kernel[...] = jax.device_put(model.blocks[0].kernel[...], sharding)
    records = inspect_sharding(model, "model")
    assert [r.path for r in records] == ["blocks.0.bias", "blocks.0.kernel", "embed.embedding"]
    assert records[1].spec == "P('fsdp', 'tensor')"
    assert records[1].shard_shape == (1, 2)
    assert inspect_sharding(nnx.state(model), "state") == records


def test_a_variable_is_one_array():
    record = inspect_sharding(nnx.Param(jnp.zeros((2, 2))), "weight")
    assert (record.path, record.shape) == ("weight", (2, 2))


def test_random_keys_have_a_size():
    record = inspect_sharding(jax.random.key(0))
    assert (record.shape, record.bytes_per_device) == ((), 8)


def test_descriptions_count_like_arrays():
    sharding = NamedSharding(abstract_mesh({"fsdp": 64, "tensor": 8}), PartitionSpec("fsdp"))
    described = jax.ShapeDtypeStruct((128, 4), jnp.bfloat16, sharding=sharding)
    record = inspect_sharding(described)
    assert (record.shard_shape, record.bytes_per_device, record.replicas) == ((2, 4), 16, 8)
    unplaced = inspect_sharding(jax.ShapeDtypeStruct((4,), jnp.int32))
    assert (unplaced.spec, unplaced.bytes_per_device) == ("not placed", 16)


def test_empty_arrays_and_trees_are_fine(mesh, capsys):
    assert inspect_sharding(place(mesh, (0, 4), None, "tensor")).bytes_per_device == 0
    assert inspect_sharding({}) == ()
    assert "0 arrays" in capsys.readouterr().out


def test_paths_are_not_read_as_markup(capsys):
    inspect_sharding({"[bold]x": 1, ":smile:": 2}, "tree")
    told = capsys.readouterr().out
    assert "[bold]x" in told
    assert ":smile:" in told


def test_visualize_mesh_prints_the_drawing(mesh, capsys):
    visualize_mesh(mesh)
    assert "fsdp   0 │ 0 │ 1 │" in capsys.readouterr().out
