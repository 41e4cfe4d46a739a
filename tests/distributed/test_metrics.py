"""DistributedMetrics inside shard_map on eight devices, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshwright.distributed import DeviceMeshManager, DistributedMetrics
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

dm = DistributedMetrics()
VALUES = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0], np.float32)
VECTORS = np.arange(24.0, dtype=np.float32).reshape(8, 3) ** 2
WEIGHTS = np.array([1, 2, 0, 4, 5, 0, 7, 8], np.float32)


@pytest.fixture(scope="module")
def mesh():
    return DeviceMeshManager().create_data_parallel_mesh()


def on_devices(mesh, function, *arguments):
    """Run a function of one value per device; its result must be the same on all of them."""

    def body(*shards):
        return function(*(shard[0] for shard in shards))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P())
    return jax.jit(mapped)(*arguments)


@pytest.mark.parametrize(
    ("method", "numpy"),
    [
        (dm.reduce_mean, np.mean),
        (dm.reduce_sum, np.sum),
        (dm.reduce_max, np.max),
        (dm.reduce_min, np.min),
    ],
)
def test_reductions_match_numpy(mesh, method, numpy):
    out = on_devices(
        mesh, lambda a, b: method({"a": a, "b": {"c": b}}, axis_name="data"), VALUES, VECTORS
    )
    np.testing.assert_allclose(out["a"], numpy(VALUES), rtol=1e-6)
    np.testing.assert_allclose(out["b"]["c"], numpy(VECTORS, axis=0), rtol=1e-6)


def test_all_gather_stacks_the_devices(mesh):
    out = on_devices(mesh, lambda v: dm.all_gather({"v": v}, axis_name="data"), VECTORS)
    np.testing.assert_array_equal(out["v"], VECTORS)


def test_all_gather_without_type_tracking(mesh):
    run = jax.shard_map(
        lambda v: dm.all_gather(v[0], axis_name="data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    np.testing.assert_array_equal(run(VECTORS), VECTORS)


def test_all_gather_of_what_is_the_same_everywhere(mesh):
    out = on_devices(mesh, lambda _: dm.all_gather(jnp.arange(2), axis_name="data"), VALUES)
    np.testing.assert_array_equal(out, np.tile([0, 1], (8, 1)))


def test_python_numbers_pass_through(mesh):
    seen = {}

    def body(value):
        metrics = {"loss": value, "lr": 0.1, "step": 3, "last": True}
        for method in (dm.reduce_mean, dm.reduce_sum, dm.reduce_max, dm.reduce_min, dm.all_gather):
            seen[method.__name__] = method(metrics, axis_name="data")
        return value[None]

    jax.shard_map(lambda v: body(v[0]), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(VALUES)
    assert len(seen) == 5
    for out in seen.values():
        assert (out["lr"], out["step"], out["last"]) == (0.1, 3, True)


def test_numpy_numbers_are_values_of_each_device(mesh):
    out = on_devices(mesh, lambda _: dm.reduce_sum(np.float32(2), axis_name="data"), VALUES)
    assert out == 16


def test_booleans_average_to_a_rate(mesh):
    out = on_devices(mesh, lambda v: dm.reduce_mean(v > 2, axis_name="data"), VALUES)
    np.testing.assert_allclose(out, np.mean(VALUES > 2))


def test_weighted_mean_counts_samples_not_devices(mesh):
    def body(value, vector, weight):
        return dm.reduce_mean({"a": value, "b": vector}, axis_name="data", weights=weight)

    out = on_devices(mesh, body, VALUES, VECTORS, WEIGHTS)
    np.testing.assert_allclose(out["a"], np.average(VALUES, weights=WEIGHTS), rtol=1e-6)
    np.testing.assert_allclose(out["b"], np.average(VECTORS, axis=0, weights=WEIGHTS), rtol=1e-6)


def test_device_without_samples_does_not_count_even_if_nan(mesh):
    values = np.where(WEIGHTS == 0, np.nan, VALUES)
    out = on_devices(mesh, lambda v, w: dm.reduce_mean(v, "data", weights=w), values, WEIGHTS)
    np.testing.assert_allclose(out, np.average(VALUES, weights=WEIGHTS), rtol=1e-6)


def test_no_samples_at_all_is_nan(mesh):
    out = on_devices(mesh, lambda v, w: dm.reduce_mean(v, "data", weights=w), VALUES, 0 * WEIGHTS)
    assert np.isnan(out)


def test_large_token_counts_do_not_overflow_half_precision(mesh):
    values, weights = np.ones(8, np.float16), np.full(8, 60_000, np.int32)
    out = on_devices(mesh, lambda v, w: dm.reduce_mean(v, "data", weights=w), values, weights)
    assert out == 1


def test_custom_reductions_per_metric(mesh):
    def body(value):
        metrics = {"loss": value, "samples": value, "norm": value, "median": value, "lr": 0.5}
        chosen = {"samples": "sum", "norm": "max", "median": jnp.median, "loss": None}
        return dm.reduce_custom(metrics, chosen, axis_name="data")

    out = on_devices(mesh, body, VALUES)
    expected = {
        "loss": VALUES.mean(),
        "samples": VALUES.sum(),
        "norm": VALUES.max(),
        "median": np.median(VALUES),
        "lr": 0.5,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(out[name], value, rtol=1e-6, err_msg=name)


def test_one_custom_reduction_holds_for_all(mesh):
    out = on_devices(mesh, lambda v: dm.reduce_custom({"a": v, "b": 2 * v}, "min", "data"), VALUES)
    assert (out["a"], out["b"]) == (-5, -10)


def test_custom_reduction_mistakes_are_named():
    with pytest.raises(UserError, match="Unsupported reduction: 'mode'"):
        dm.reduce_custom({"a": 1.0}, {"a": "mode"})
    with pytest.raises(UserError, match=r"`los`(.|\n)*did you mean `loss`"):
        dm.reduce_custom({"loss": 1.0}, {"los": "sum"})


def test_global_metrics_under_jit_are_left_alone():
    metrics = {"loss": jnp.float32(2.5)}
    for method in (dm.reduce_mean, dm.reduce_max, dm.reduce_min, dm.reduce_custom):
        assert jax.jit(method)(metrics)["loss"] == 2.5


@pytest.mark.parametrize("method", [dm.reduce_sum, dm.all_gather])
def test_operations_that_need_an_axis_say_so(method):
    with pytest.raises(UserError, match=f"{method.__name__} needs a named axis"):
        method({"loss": jnp.float32(1)})


def test_wrong_axis_name_is_an_error_not_a_skip(mesh):
    with pytest.raises(UserError, match=r"no axis `batch`(.|\n)*axis_name='data'"):
        on_devices(mesh, dm.reduce_mean, VALUES)


def test_works_in_vmap():
    out = jax.vmap(dm.reduce_mean, axis_name="batch")(VALUES)
    np.testing.assert_allclose(out, np.full(8, VALUES.mean()), rtol=1e-6)
    gathered = jax.vmap(dm.all_gather, axis_name="batch")(VALUES)
    np.testing.assert_array_equal(gathered, np.tile(VALUES, (8, 1)))


def test_collect_gives_one_host_value_per_device(mesh):
    per_device = jax.shard_map(lambda v: v * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    out = dm.collect_from_devices({"loss": per_device(VALUES), "lr": 0.1, "best": jnp.float32(3)})
    assert [float(value) for value in out["loss"]] == list(VALUES * 2)
    assert out["lr"] == 0.1
    assert out["best"] == 3


STATIC = {
    "mean": DistributedMetrics.reduce_mean_static,
    "sum": DistributedMetrics.reduce_sum_static,
    "max": DistributedMetrics.reduce_max_static,
    "min": DistributedMetrics.reduce_min_static,
    "all": DistributedMetrics.all_gather_static,
}
EXPECTED = {
    "mean": VALUES.mean(),
    "sum": VALUES.sum(),
    "max": VALUES.max(),
    "min": VALUES.min(),
    "all": VALUES,
}


def reduce_in_every_way(value):
    metrics = {"v": value, "lr": 0.1}
    out = {name: reduce(metrics, axis_name="data") for name, reduce in STATIC.items()}
    out["weighted"] = DistributedMetrics.reduce_mean_static(metrics, axis_name="data", weights=2.0)
    out["custom"] = DistributedMetrics.reduce_custom_static(
        metrics, reduce_fn={"v": "sum"}, axis_name="data"
    )
    return out


@pytest.mark.parametrize("through", ["shard_map", "pmap"])
def test_static_methods_reduce_like_numpy(mesh, through):
    if through == "pmap":
        out = jax.pmap(reduce_in_every_way, axis_name="data")(VALUES)
        out = jax.tree.map(lambda leaf: leaf[0], out)
    else:
        out = on_devices(mesh, reduce_in_every_way, VALUES)
    for name, expected in EXPECTED.items():
        np.testing.assert_allclose(out[name]["v"], expected, rtol=1e-6)
        np.testing.assert_allclose(out[name]["lr"], 0.1, rtol=1e-6)
    np.testing.assert_allclose(out["weighted"]["v"], VALUES.mean(), rtol=1e-6)
    np.testing.assert_allclose(out["custom"]["v"], VALUES.sum(), rtol=1e-6)


def test_static_collection_lists_the_devices():
    collected = DistributedMetrics.collect_from_devices_static({"v": jnp.asarray(VALUES), "n": 3})
    assert collected == {"v": list(VALUES), "n": 3}


def test_it_can_be_part_of_an_nnx_model():
    class Evaluation(nnx.Module):
        def __init__(self):
            self.metrics = DistributedMetrics()

    graph, state = nnx.split(Evaluation())
    assert not jax.tree.leaves(state)
    assert nnx.merge(graph, state).metrics.reduce_mean({"v": 1.0}) == {"v": 1.0}
