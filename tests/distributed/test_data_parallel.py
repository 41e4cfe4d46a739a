"""DataParallel: where leaves land, and gradients against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.distributed import DataParallel, DeviceMeshManager
from meshwright.errors import UserError

dp = DataParallel()


@pytest.fixture(scope="module")
def mesh():
    return DeviceMeshManager().create_data_parallel_mesh()


@pytest.fixture(scope="module")
def sharding(mesh):
    return dp.create_data_parallel_sharding(mesh)


def shard_shapes(array):
    return {shard.data.shape for shard in array.addressable_shards}


def test_batch_is_split_along_dim_0(sharding):
    batch = {"x": np.arange(32.0).reshape(16, 2), "y": jnp.arange(16)}
    out = dp.shard_batch(batch, sharding)
    assert shard_shapes(out["x"]) == {(2, 2)}
    assert shard_shapes(out["y"]) == {(2,)}
    np.testing.assert_array_equal(out["x"], batch["x"])
    for shard in out["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, batch["x"][shard.index])


def test_scalars_of_every_kind_are_replicated(sharding):
    batch = {"python": 3, "flag": True, "zero_d": np.float32(0.5), "array": jnp.zeros(())}
    out = dp.shard_batch(batch, sharding)
    for leaf in jax.tree.leaves(out):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.sharding.device_set) == 8
    assert [out["python"], out["flag"], out["zero_d"], out["array"]] == [3, True, 0.5, 0]


def test_random_keys_can_ride_along(sharding):
    out = dp.shard_batch({"keys": jax.random.split(jax.random.key(0), 8)}, sharding)
    assert shard_shapes(out["keys"]) == {(1,)}


def test_indivisible_leaf_is_named_with_its_numbers(sharding):
    with pytest.raises(UserError, match=r"\['b'\]\[0\] .*\n.*12.* 8 .*\n.*8 or 16"):
        dp.shard_batch({"a": np.zeros((8, 2)), "b": [np.zeros((12, 2))]}, sharding)


def test_bare_array_has_a_name_too(sharding):
    with pytest.raises(UserError, match="the array cannot be split"):
        dp.shard_batch(np.zeros(3), sharding)


def test_trailing_nones_of_a_sharding_fit_lower_ranks(mesh):
    two_dims = jax.sharding.NamedSharding(mesh, P("data", None))
    out = dp.shard_batch({"x": np.zeros((8, 3)), "y": np.zeros(8)}, two_dims)
    assert shard_shapes(out["y"]) == {(1,)}
    with pytest.raises(UserError, match=r"\['y'\] has too few dims"):
        dp.shard_batch({"y": np.zeros(8)}, jax.sharding.NamedSharding(mesh, P(None, "data")))


def test_unknown_data_axis_is_refused(mesh):
    with pytest.raises(UserError, match=r"no axis `dta`\n.*data\ndid you mean `data`"):
        dp.create_data_parallel_sharding(mesh, "dta")


def test_state_is_replicated_by_default(mesh):
    state = {"w": np.ones((8, 4)), "step": 7}
    for out in (dp.shard_model_state(state, mesh), dp.replicate_params(state, mesh)):
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(out))
        assert out["step"] == 7


def test_sharded_state_uses_the_largest_dim_that_divides(mesh):
    state = {
        "kernel": np.arange(8 * 64.0).reshape(8, 64),
        "odd_rows": np.zeros((3, 16)),
        "bias": np.zeros(8),
        "odd": np.zeros((3, 5)),
        "empty": np.zeros((0, 8)),
        "step": 1,
    }
    out = dp.shard_model_state(state, mesh, "shard")
    shapes = {name: shard_shapes(leaf) for name, leaf in out.items()}
    assert shapes == {
        "kernel": {(8, 8)},
        "odd_rows": {(3, 2)},
        "bias": {(1,)},
        "odd": {(3, 5)},
        "empty": {(0, 8)},
        "step": {()},
    }
    np.testing.assert_array_equal(out["kernel"], state["kernel"])


def test_sharded_state_prefers_the_fsdp_axis():
    mesh = DeviceMeshManager().create_device_mesh({"data": 2, "fsdp": 4})
    out = dp.shard_model_state({"w": np.zeros((8, 4))}, mesh, "shard")
    assert shard_shapes(out["w"]) == {(2, 4)}


def test_unknown_state_sharding_is_refused(mesh):
    with pytest.raises(ValueError, match="Unsupported param_sharding"):
        dp.shard_model_state({}, mesh, "split")  # type: ignore[arg-type]


def test_gradients_in_shard_map_match_the_closed_form(mesh):
    grads = np.arange(16.0).reshape(8, 2)

    def body(g):
        tree = {"w": g[0], "nested": [g[0] * 2]}
        mean = dp.all_reduce_gradients(tree, axis_name="data")
        total = dp.all_reduce_gradients(tree, "sum", axis_name="data")
        return mean, total

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P()))
    mean, total = run(grads)
    np.testing.assert_allclose(mean["w"], grads.mean(0))
    np.testing.assert_allclose(mean["nested"][0], 2 * grads.mean(0))
    np.testing.assert_allclose(total["w"], grads.sum(0))


def test_gradients_over_two_axes():
    mesh = DeviceMeshManager().create_hybrid_mesh(4, 2)
    grads = np.arange(8.0)
    run = jax.shard_map(
        lambda g: dp.all_reduce_gradients(g, axis_name=("data", "model")),
        mesh=mesh,
        in_specs=P(("data", "model")),
        out_specs=P(),
    )
    np.testing.assert_allclose(run(grads), [3.5])


def test_gradients_in_vmap_with_the_default_axis_name():
    grads = np.arange(8.0)
    out = jax.vmap(dp.all_reduce_gradients, axis_name="batch")(grads)
    np.testing.assert_allclose(out, np.full(8, 3.5))


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def regression():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 3)), rng.normal(size=16)
    w = rng.normal(size=3)
    # d/dw mean((xw - y)²) = 2 xᵀ(xw - y) / n
    return w, x, y, 2 * x.T @ (x @ w - y) / 16


def test_local_gradients_average_to_the_gradient_of_the_whole_batch(mesh):
    w, x, y, expected = regression()

    def body(w, x, y):
        return dp.all_reduce_gradients(jax.grad(loss)(w, x, y), axis_name="data")

    specs = (P(), P("data"), P("data"))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    np.testing.assert_allclose(jax.jit(run)(w, x, y), expected, rtol=1e-5)


def test_under_jit_the_gradients_are_global_and_stay_as_they_are(sharding, mesh):
    w, x, y, expected = regression()
    batch = dp.shard_batch({"x": x, "y": y}, sharding)

    @jax.jit
    def step(w, batch):
        return dp.all_reduce_gradients(jax.grad(loss)(w, batch["x"], batch["y"]))

    np.testing.assert_allclose(step(dp.replicate_params(w, mesh), batch), expected, rtol=1e-5)


def test_gradients_that_shard_map_summed_are_refused(mesh):
    """With check_vma, jax.grad of replicated parameters sums over the axis by itself."""
    w, x, y, _ = regression()

    def body(w, x, y):
        return dp.all_reduce_gradients(jax.grad(loss)(w, x, y), axis_name="data")

    run = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    with pytest.raises(UserError, match=r"same on all 8 devices(.|\n)*8 times(.|\n)*check_vma"):
        run(w, x, y)


def test_a_leaf_without_gradient_may_be_the_same_everywhere(mesh):
    def body(g):
        return dp.all_reduce_gradients({"w": g[0], "frozen": jnp.zeros(2)}, axis_name="data")

    run = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P())
    np.testing.assert_array_equal(run(np.arange(8.0))["frozen"], [0, 0])


def test_unknown_reduce_type_is_refused():
    with pytest.raises(ValueError, match="Unsupported reduce_type: 'max'"):
        dp.all_reduce_gradients({}, reduce_type="max")  # type: ignore[arg-type]


def test_named_axis_that_is_not_there_is_refused(mesh):
    with pytest.raises(UserError, match=r"no axis `data` surrounds(.|\n)*global"):
        jax.jit(lambda g: dp.all_reduce_gradients(g, axis_name="data"))(1.0)
    run = jax.shard_map(dp.all_reduce_gradients, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(UserError, match=r"no axis `batch`(.|\n)*axis_name='data'"):
        run(np.arange(8.0))


def test_sum_without_an_axis_is_refused():
    with pytest.raises(UserError, match="needs a named axis"):
        dp.all_reduce_gradients(jnp.ones(2), reduce_type="sum")


def test_static_twins_do_the_same(mesh, sharding):
    assert DataParallel.create_data_parallel_sharding_static(mesh) == sharding
    assert DataParallel.create_data_parallel_sharding_static(mesh, axis_name="data") == sharding
    batch = np.arange(8.0)
    static = DataParallel.shard_batch_static(batch, sharding)
    assert static.sharding == dp.shard_batch(batch, sharding).sharding
    out = jax.vmap(DataParallel.all_reduce_gradients_static, axis_name="batch")(batch)
    np.testing.assert_allclose(out, np.full(8, 3.5))


@pytest.mark.parametrize("keyword", ["gradients", "grads"])
def test_gradients_are_passed_by_keyword(mesh, keyword):
    def body(values):
        return DataParallel.all_reduce_gradients_static(
            **{keyword: values[0]}, reduce_type="sum", axis_name="data"
        ), dp.all_reduce_gradients(**{keyword: values[0]}, axis_name="data")

    run = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P())
    total, mean = jax.jit(run)(np.arange(8.0))
    assert (total, mean) == (28.0, 3.5)
