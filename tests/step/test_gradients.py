"""Gradients of a batch, whole or in microbatches, against closed forms in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import Weighted
from meshwright.program.trace.traced_loss import LossValue
from meshwright.step.gradients import accumulate_gradients, compute_gradients

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(16, 5)), RANDOM.normal(size=16)
WEIGHTS = RANDOM.integers(0, 9, size=16).astype(float)
PARAMS = [RANDOM.normal(size=5), np.asarray(0.3)]


def regression(params, state, batch):
    """Weighted squared error of a linear model; the state counts microbatches and sums inputs."""
    x, y, weight = batch
    errors = x @ params[0] + params[1] - y
    return LossValue(
        Weighted((weight * errors**2).sum(), weight.sum()),
        {"bias": Weighted(errors.sum(), jnp.asarray(1.0 * len(y)))},
        [state[0] + 1, state[1] + x.sum()],
    )


def closed_form():
    errors = X @ PARAMS[0] + PARAMS[1] - Y
    scaled = 2 * WEIGHTS * errors / WEIGHTS.sum()
    return (WEIGHTS * errors**2).sum() / WEIGHTS.sum(), [scaled @ X, scaled.sum()], errors.mean()


def split(count):
    return [np.stack([a[n::count] for n in range(count)]) for a in (X, Y, WEIGHTS)]


def check(found):
    loss, gradients, bias = closed_form()
    np.testing.assert_allclose(found.loss, loss, rtol=1e-13)
    np.testing.assert_allclose(found.metrics["bias"], bias, rtol=1e-12)
    for ours, theirs in zip(found.values, gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


STATE = [np.asarray(0), np.asarray(0.0)]


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_one_batch_matches_the_closed_form(scale):
    scale = None if scale is None else jnp.asarray(scale)
    check(compute_gradients(regression, PARAMS, STATE, [X, Y, WEIGHTS], scale))


@pytest.mark.parametrize(
    "count", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 16)), 4]
)
def test_microbatches_of_unequal_weight_match_the_whole_batch(count):
    found = accumulate_gradients(regression, PARAMS, STATE, split(count))
    check(found)
    assert int(found.model_state[0]) == count
    np.testing.assert_allclose(found.model_state[1], X.sum(), rtol=1e-12)


def test_scaling_and_constraining_change_nothing():
    seen = []

    def constrain(gradients):
        seen.append([g.shape for g in gradients])
        return gradients

    found = accumulate_gradients(
        regression, PARAMS, STATE, split(4), jnp.asarray(4096.0), constrain
    )
    check(found)
    assert seen == [[(5,), ()]] * len(seen)
    assert len(seen) >= 2


def test_a_microbatch_without_weight_counts_for_nothing():
    x, y, weights = split(4)
    weights = weights.copy()
    weights[2] = 0
    found = accumulate_gradients(regression, PARAMS, STATE, [x, y, weights])
    kept = [0, 1, 3]
    again = accumulate_gradients(regression, PARAMS, STATE, [a[kept] for a in (x, y, weights)])
    np.testing.assert_allclose(found.loss, again.loss, rtol=1e-13)
    for ours, theirs in zip(found.values, again.values, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_a_batch_without_any_weight_gives_zeros_not_nan():
    nothing = np.zeros(16)
    for found in (
        compute_gradients(regression, PARAMS, STATE, [X, Y, nothing]),
        accumulate_gradients(regression, PARAMS, STATE, [*split(4)[:2], np.zeros((4, 4))]),
    ):
        assert float(found.loss) == 0
        assert all(not np.any(g) for g in found.values)


def test_parameters_of_16_bits_have_sums_of_32():
    def loss(params, state, batch):
        value = (params[0].astype(jnp.float32) * batch[0]).sum()
        return LossValue(Weighted(value, jnp.ones((), jnp.float32)), {}, [])

    # Added up in bfloat16, nothing after the first would count.
    parts = np.asarray([256.0, *[0.5] * 512], np.float32)
    found = accumulate_gradients(loss, [jnp.ones((), jnp.bfloat16)], [], [parts])
    assert found.values[0].dtype == jnp.bfloat16
    assert float(found.values[0]) == float(jnp.asarray(512 / 513, jnp.bfloat16))


def test_state_is_handed_from_microbatch_to_microbatch():
    def growing(params, state, batch):
        loss = jnp.sum(params[0] * state[0])
        return LossValue(Weighted(loss, jnp.asarray(1.0)), {}, [2 * state[0]])

    found = accumulate_gradients(growing, [np.asarray(1.0)], [np.asarray(1.0)], [np.zeros((4, 1))])
    assert float(found.values[0]) == (1 + 2 + 4 + 8) / 4
    assert float(found.model_state[0]) == 16
