"""Gradients of a batch, whole or in microbatches, against closed forms in float64."""

from dataclasses import replace

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


@pytest.mark.parametrize("recomputes", [False, True])
def test_weights_are_cast_once_for_all_microbatches_unless_blocks_are_recomputed(recomputes):
    def loss(params, state, batch):
        weight, bias = (param.astype(jnp.bfloat16) for param in params)
        block = jax.checkpoint(lambda x: jnp.tanh(x @ weight + bias))
        x = (block if recomputes else block.__wrapped__)(batch[0].astype(jnp.bfloat16))
        return LossValue(Weighted(x.sum().astype(jnp.float32), jnp.float32(x.size)), {}, [])

    params = [RANDOM.normal(size=shape).astype(np.float32) for shape in ((5, 5), (5,))]
    whole = RANDOM.normal(size=(4, 6, 5)).astype(np.float32)
    program = jax.make_jaxpr(lambda *args: accumulate_gradients(loss, *args).values)(
        params, [], [whole]
    )
    (scan,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    casts = [
        eqn.invars[0].aval.shape
        for eqn in scan.params["jaxpr"].jaxpr.eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.dtype == jnp.bfloat16
    ]
    assert (6, 5) in casts
    assert recomputes == ({(5, 5), (5,)} <= {*casts})
    assert recomputes or not {(5, 5), (5,)} & {*casts}
    found = accumulate_gradients(loss, params, [], [whole])
    expected = compute_gradients(loss, params, [], [whole.reshape(-1, 5)])
    for ours, theirs in zip(found.values, expected.values, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=1e-3)


def test_a_parameter_that_is_written_is_cast_again():
    def loss(params, state, batch):
        half = params[0].astype(jnp.bfloat16).astype(jnp.float32)
        value = LossValue(Weighted((half * batch[0]).sum(), jnp.float32(1)), {}, [])
        return replace(value, written={0: 2 * params[0]})

    start = [jnp.ones((), jnp.float32)]
    found = accumulate_gradients(loss, start, [], [np.ones((4, 1), np.float32)], written=[0])
    assert float(found.loss) == (1 + 2 + 4 + 8) / 4
    assert float(found.params[0]) == 16
