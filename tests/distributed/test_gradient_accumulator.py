"""GradientAccumulator against closed forms and against the gradient of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.distributed import GradientAccumulator, GradientAccumulatorConfig
from meshwright.errors import UserError


def accumulator(steps=4, **options):
    return GradientAccumulator(GradientAccumulatorConfig(accumulation_steps=steps, **options))


def test_an_update_is_due_after_every_fourth_microbatch():
    assert [accumulator().should_update(step) for step in range(8)] == [
        False, False, False, True, False, False, False, True,
    ]  # fmt: skip
    assert accumulator(1).should_update(0)


def test_the_mean_is_that_of_the_microbatches():
    acc = accumulator()
    for value in (1.0, 2.0, 3.0, 6.0):
        acc.accumulate({"w": np.full((2, 3), value), "b": [jnp.asarray(-value)]})
    assert acc.current_step == 4
    mean = acc.get_gradients()
    np.testing.assert_array_equal(mean["w"], np.full((2, 3), 3.0))
    assert mean["b"][0] == -3


def test_a_window_that_is_not_full_divides_by_what_it_holds():
    acc = accumulator(4)
    acc.accumulate(jnp.asarray(2.0))
    acc.accumulate(jnp.asarray(4.0))
    assert acc.get_gradients() == 3


def test_microbatches_count_with_their_weight():
    acc = accumulator()
    for value, weight in ((1.0, 10), (5.0, 30), (7.0, 0)):
        acc.accumulate(jnp.asarray(value), weight=weight)
    assert acc.get_gradients() == (10 + 150) / 40


def test_no_weight_at_all_is_no_gradient():
    acc = accumulator()
    acc.accumulate(jnp.asarray(0.0), weight=0)
    assert acc.get_gradients() == 0


def test_sums_are_given_when_asked_for():
    acc = accumulator(2, normalize_gradients=False)
    acc.accumulate(jnp.asarray(2.0))
    acc.accumulate(jnp.asarray(4.0))
    assert acc.get_gradients() == 6


def test_getting_the_gradients_starts_anew_and_reset_forgets():
    acc = accumulator()
    acc.accumulate(jnp.asarray(100.0))
    acc.get_gradients()
    assert acc.current_step == 0
    acc.accumulate(jnp.asarray(100.0))
    acc.reset()
    assert acc.current_step == 0
    acc.accumulate(jnp.asarray(1.0))
    assert acc.get_gradients() == 1


def test_half_precision_is_summed_in_float32_and_rounded_once():
    """In bfloat16, 256 + 1 is 256: adding ones would stop there."""
    acc = accumulator(512)
    for _ in range(512):
        acc.accumulate(jnp.ones((), jnp.bfloat16))
    mean = acc.get_gradients()
    assert mean == 1
    assert mean.dtype == jnp.bfloat16


def test_the_gradients_given_are_not_consumed():
    acc = accumulator()
    grads = {"w": jnp.arange(4.0)}
    for _ in range(3):
        acc.accumulate(grads)
    acc.get_gradients()
    np.testing.assert_array_equal(grads["w"], np.arange(4.0))


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (8, 16, 8)])
def test_an_nnx_model_accumulates_the_gradient_of_the_whole_batch(sizes):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(32, 6)), rng.normal(size=(32, 3))
    acc = accumulator()
    with jax.enable_x64(True):
        model = nnx.Linear(6, 3, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        grad = nnx.jit(nnx.grad(lambda model, x, y: jnp.mean((model(x) - y) ** 2)))
        ends = np.cumsum(sizes)
        for end, size in zip(ends, sizes, strict=True):
            rows = slice(end - size, end)
            acc.accumulate(grad(model, x[rows], y[rows]), weight=size)
        mean, whole = acc.get_gradients(), grad(model, x, y)
    assert isinstance(mean, nnx.State)
    for parts, all_at_once in zip(jax.tree.leaves(mean), jax.tree.leaves(whole), strict=True):
        assert parts.dtype == "float64"
        np.testing.assert_allclose(np.asarray(parts), np.asarray(all_at_once), rtol=1e-12)


def test_divided_gradients_stay_divided():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    acc = accumulator(2)
    for value in (1.0, 3.0):
        acc.accumulate(jax.device_put(np.full((16, 2), value), sharding))
    mean = acc.get_gradients()
    assert mean.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(mean, np.full((16, 2), 2.0))


def test_mistakes_are_named():
    with pytest.raises(UserError, match="accumulation_steps=0"):
        GradientAccumulatorConfig(accumulation_steps=0)
    acc = accumulator()
    with pytest.raises(UserError, match="nothing was accumulated"):
        acc.get_gradients()
    acc.accumulate({"w": jnp.ones(3)})
    with pytest.raises(UserError, match="another structure"):
        acc.accumulate({"v": jnp.ones(3)})
    with pytest.raises(UserError, match=r"first \(3,\), now \(4,\)"):
        acc.accumulate({"w": jnp.ones(4)})


def test_the_sum_so_far_can_be_read():
    acc = accumulator()
    assert acc.accumulated_grads is None
    gradients = {"w": np.full((2, 3), 1.5, np.float16)}
    acc.accumulate(gradients)
    first = acc.accumulated_grads
    acc.accumulate(gradients, weight=3.0)
    np.testing.assert_array_equal(first["w"], np.full((2, 3), 1.5))
    np.testing.assert_array_equal(acc.accumulated_grads["w"], np.full((2, 3), 6.0))
    assert acc.accumulated_grads["w"].dtype == np.float32
    acc.get_gradients()
    assert acc.accumulated_grads is None
