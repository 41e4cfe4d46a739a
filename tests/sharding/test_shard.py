"""shard_fsdp: every device holds its share, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def mesh():
    return mw.build_mesh({"fsdp": 8})


class Tied(nnx.Module):
    """A model whose output layer is its embedding."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.mixer = nnx.Linear(32, 32, rngs=rngs)
        self.head = self.embed


@pytest.fixture(scope="module")
def model():
    return Tied(nnx.Rngs(0))


def held(array):
    """Return the fraction of an array each device holds; the same on all of them."""
    fractions = {shard.data.size / array.size for shard in array.addressable_shards}
    assert len(array.addressable_shards) == 8
    assert len(fractions) == 1
    return fractions.pop()


def test_each_device_holds_one_of_eight_parts_with_the_values_unchanged(mesh):
    params = {"a": rng.normal(size=(64, 32)), "b": [rng.normal(size=(16, 128)).astype("float16")]}
    sharded = mw.shard_fsdp(params, mesh)
    assert jax.tree.structure(sharded) == jax.tree.structure(params)
    assert held(sharded["a"]) == held(sharded["b"][0]) == 1 / 8
    assert sharded["b"][0].dtype == jnp.float16
    np.testing.assert_array_equal(sharded["a"], params["a"].astype("float32"))
    for shard in sharded["b"][0].addressable_shards:
        np.testing.assert_array_equal(shard.data, params["b"][0][shard.index])


def test_the_largest_dim_that_divides_is_divided(mesh):
    shapes = {
        "kernel": (64, 256),
        "vocabulary": (5027, 64),
        "square": (40, 40),
        "conv": (3, 24, 15),
    }
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    specs = {name: leaf.sharding.spec for name, leaf in mw.shard_fsdp(params, mesh).items()}
    assert specs == {
        "kernel": P(None, "fsdp"),
        "vocabulary": P(None, "fsdp"),
        "square": P(None, "fsdp"),
        "conv": P(None, "fsdp"),
    }


def test_small_and_indivisible_arrays_are_whole_everywhere(mesh):
    params = {"bias": np.ones(64), "odd": np.ones((99, 99)), "scalar": 3.0, "step": jnp.array(7)}
    sharded = mw.shard_fsdp(params, mesh)
    assert {name: held(leaf) for name, leaf in sharded.items()} == dict.fromkeys(params, 1.0)
    assert held(mw.shard_fsdp(params, mesh, min_shard_size=1)["bias"]) == 1 / 8


def test_another_axis_can_be_named():
    mesh = mw.build_mesh({"fsdp": 2, "tensor": 4})
    kernel = mw.shard_fsdp(np.ones((64, 32)), mesh, axis_name="tensor")
    assert kernel.sharding.spec == P("tensor")
    data = mw.shard_fsdp(np.ones((64, 32)), mw.build_mesh({"data": 8}), axis_name="data")
    assert held(data) == 1 / 8


def test_what_is_divided_already_stays_divided():
    mesh = mw.build_mesh({"fsdp": 4, "tensor": 2})
    columns = jax.device_put(np.ones((64, 128)), NamedSharding(mesh, P(None, "tensor")))
    both = mw.shard_fsdp(columns, mesh)
    assert both.sharding.spec == P("fsdp", "tensor")
    assert mw.shard_fsdp(both, mesh).sharding.spec == P("fsdp", "tensor")
    assert mw.shard_fsdp(both, mesh, axis_name="tensor").sharding.spec == P("fsdp", "tensor")
    assert mw.shard_fsdp(columns, mw.build_mesh({"fsdp": 8})).sharding.spec == P(None, "fsdp")


def test_a_missing_axis_is_named(mesh):
    with pytest.raises(UserError, match=r"no axis `fdsp`\n.*fsdp\n.*did you mean `fsdp`"):
        mw.shard_fsdp({"w": np.ones((8, 8))}, mesh, axis_name="fdsp")
    with pytest.raises(UserError, match=r"no axis `fsdp`\n.*data\n"):
        mw.shard_fsdp({"w": np.ones((8, 8))}, mw.build_mesh({"data": 8}))


def test_a_model_keeps_its_shared_weights_and_the_original_is_left_alone(mesh, model):
    sharded = mw.shard_fsdp(model, mesh)
    assert sharded.head is sharded.embed
    assert held(sharded.embed.embedding[...]) == held(sharded.mixer.kernel[...]) == 1 / 8
    assert len(model.embed.embedding[...].sharding.device_set) == 1
    np.testing.assert_array_equal(sharded.mixer.kernel[...], model.mixer.kernel[...])


def test_states_optimizers_and_dicts_of_models_are_welcome(mesh, model):
    state = mw.shard_fsdp(nnx.state(model, nnx.Param), mesh)
    assert isinstance(state, nnx.State)
    assert held(state["embed"]["embedding"][...]) == 1 / 8
    optimizer = mw.shard_fsdp(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), mesh)
    moments = [leaf for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.size >= 1024]
    assert [held(leaf) for leaf in moments] == [1 / 8] * 4
    pair = mw.shard_fsdp({"one": model, "two": model}, mesh)
    assert pair["one"] is pair["two"]
    assert held(pair["two"].mixer.kernel[...]) == 1 / 8


def test_gradients_through_jit_equal_one_device_and_stay_divided(mesh):
    params = {"up": rng.normal(size=(32, 64)), "down": rng.normal(size=(64, 32))}
    x = rng.normal(size=(16, 32))

    @jax.grad
    def gradients(params, x):
        return (jnp.tanh(x @ params["up"]) @ params["down"] - x[:, ::-1]).var()

    with jax.enable_x64(True):
        expected = jax.jit(gradients)(params, x)
        sharded = mw.shard_fsdp(params, mesh)
        divided = jax.tree.map(lambda leaf: leaf.sharding, sharded)
        batch = jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        found = jax.jit(gradients, out_shardings=divided)(sharded, batch)
    for name in params:
        assert held(found[name]) == 1 / 8
        one, eight = np.asarray(expected[name]), np.asarray(found[name])
        assert one.dtype == "float64"
        assert np.abs(eight - one).max() <= 1e-12 * np.abs(one).max()
