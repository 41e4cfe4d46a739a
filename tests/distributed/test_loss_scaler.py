"""DynamicLossScaler: the course of the scale, and gradients that would vanish without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.distributed import DynamicLossScaler, DynamicLossScalerConfig
from meshwright.errors import UserError

ALL_GOOD, BAD = False, True


def scaler(**options):
    return DynamicLossScaler(DynamicLossScalerConfig(**options))


def course(scaler, overflows):
    """Return the scale after each step."""
    scales = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        scales.append(float(scaler.scale))
    return scales


def test_it_starts_at_two_to_the_fifteenth():
    assert DynamicLossScaler().scale == 2**15
    assert DynamicLossScaler().config == DynamicLossScalerConfig()


def test_it_doubles_after_two_thousand_good_steps():
    one = DynamicLossScaler()

    @jax.jit
    def after(scaler, count):
        def good(_, scaler):
            scaler.update_scale(ALL_GOOD)
            return scaler

        return jax.lax.fori_loop(0, count, good, scaler)

    assert after(one, 1999).scale == 2**15
    assert after(one, 2000).scale == 2**16
    assert after(one, 3999).scale == 2**16
    assert after(one, 4000).scale == 2**17
    assert after(one, 40_000).scale == 2**24


def test_it_halves_on_overflow_and_counts_anew():
    one = scaler(initial_scale=64.0, growth_interval=2)
    overflows = [ALL_GOOD, BAD, ALL_GOOD, ALL_GOOD, BAD, BAD, ALL_GOOD]
    assert course(one, overflows) == [64, 32, 32, 64, 32, 16, 16]
    assert one.skipped == 3


def test_it_stays_within_its_bounds():
    low = scaler(initial_scale=4.0)
    assert course(low, [BAD] * 4) == [2, 1, 1, 1]
    high = scaler(initial_scale=2.0**23, growth_interval=1)
    assert course(high, [ALL_GOOD] * 3) == [2**24] * 3


def test_other_factors_hold():
    one = scaler(initial_scale=16.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=1)
    assert course(one, [ALL_GOOD, BAD]) == [48, 12]


def test_scaling_and_unscaling_cancel_exactly():
    one = DynamicLossScaler()
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    plain = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    scaled = nnx.grad(lambda model: one.scale_loss((model(x) ** 2).mean()))(model)
    unscaled = one.unscale_gradients(scaled)
    assert isinstance(unscaled, nnx.State)
    jax.tree.map(np.testing.assert_array_equal, unscaled, plain)
    assert not one.check_overflow(scaled)


def test_gradients_below_the_smallest_float16_survive():
    """6e-8 is the smallest positive float16; here the true gradient is 2^-30."""
    one = DynamicLossScaler()
    x = jnp.asarray(2.0**-15, jnp.float16)

    def loss(w):
        return (w * x).astype(jnp.float32) * 2.0**-15

    w = jnp.asarray(1.0, jnp.float16)
    assert jax.grad(loss)(w) == 0
    scaled = jax.grad(lambda w: one.scale_loss(loss(w)))(w)
    assert scaled.dtype == jnp.float16
    assert one.unscale_gradients(scaled) == 2.0**-30


def test_a_float16_loss_does_not_overflow():
    scaled = DynamicLossScaler().scale_loss(jnp.asarray(8.0, jnp.float16))
    assert scaled == 2**18
    assert DynamicLossScaler().scale_loss(8.0) == 2**18


@pytest.mark.parametrize(
    ("value", "overflow"), [(1.0, False), (np.inf, True), (-np.inf, True), (np.nan, True)]
)
def test_overflow_is_seen_in_any_leaf(value, overflow):
    grads = {"a": jnp.ones((3, 3)), "b": [jnp.zeros(5).at[4].set(value)], "count": jnp.array(3)}
    one = DynamicLossScaler()
    assert bool(one.check_overflow(grads)) is overflow
    assert bool(one.check_overflow(one.unscale_gradients(grads))) is overflow


def test_nothing_does_not_overflow():
    assert not DynamicLossScaler().check_overflow({})


def test_a_compiled_step_takes_it_and_returns_it():
    @jax.jit
    def step(scaler, w, x):
        grad = jax.grad(lambda w: scaler.scale_loss((w.astype(jnp.float16) * x).sum()))(w)
        grad = scaler.unscale_gradients(grad)
        overflow = scaler.check_overflow(grad)
        scaler.update_scale(overflow)
        return scaler, jnp.where(overflow, w, w - grad)

    one, w = scaler(initial_scale=2.0**17), jnp.asarray(1.0)
    x = jnp.asarray([1.0], jnp.float16)
    scales, weights = [], []
    for _ in range(4):
        one, w = step(one, w, x)
        scales.append(float(one.scale))
        weights.append(float(w))
    # A float16 gradient holds at most 65504, so 2^17 and 2^16 overflow and 2^15 does not.
    assert scales == [2**16, 2**15, 2**15, 2**15]
    assert weights == [1, 1, 0, -1]
    assert one.skipped == 2


def test_being_compiled_as_a_constant_is_refused():
    one = DynamicLossScaler()
    for call in (one.scale_loss, one.unscale_gradients, one.update_scale):
        with pytest.raises(UserError, match="not an argument"):
            jax.jit(call)(jnp.asarray(1.0))
    assert one.scale == 2**15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_scale": 0.0}, "min_scale=0.0"),
        ({"initial_scale": 2.0**25}, "initial_scale=33554432.0"),
        ({"growth_factor": 0.5}, "growth_factor=0.5"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        DynamicLossScalerConfig(**options)


def test_steps_since_growth_counts_good_steps():
    one = scaler(initial_scale=1000.0, growth_interval=3)
    counts = []
    for overflow in (False, False, True, False, False, False):
        one.update_scale(overflow_detected=overflow)
        counts.append(int(one.steps_since_growth))
    assert counts == [1, 2, 0, 1, 2, 0]
    assert one.scale == 1000.0  # halved, then doubled


def test_overflow_has_two_keywords():
    one, other = scaler(initial_scale=1000.0), scaler(initial_scale=1000.0)
    one.update_scale(overflow_detected=True)
    other.update_scale(overflow=True)
    assert one.scale == other.scale == 500.0
    with pytest.raises(UserError, match="both overflow_detected= and overflow="):
        one.update_scale(overflow_detected=True, overflow=True)
