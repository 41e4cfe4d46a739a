"""The tolerance of rounding covers what float32 does, and little more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.proof.rounding import rounding_tolerance


def deep(x, scale):
    """Norms and activations without a single product of matrices."""
    for _ in range(40):
        x = jnp.tanh(x * scale) / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
    return (x**2).mean()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_arithmetic_between_products_counts(seed):
    random = np.random.default_rng(seed)
    x, scale = random.normal(size=(8, 16)), 1 + 0.1 * random.normal(size=16)
    narrow = [np.asarray(a, np.float32) for a in (x, scale)]
    tolerance = rounding_tolerance(jax.make_jaxpr(deep)(*narrow))
    with jax.enable_x64(True):
        exact = jax.grad(deep, 1)(*[a.astype(np.float64) for a in narrow])
    found = jax.grad(deep, 1)(*narrow)
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert 0 < error <= tolerance
    assert tolerance < 1e-5


def test_moving_numbers_does_not_round_them():
    def moved(x):
        return jnp.concatenate([x.T[::-1], x.T], axis=1).reshape(-1)[3:]

    x = np.ones((4, 4), np.float32)
    one_sum = rounding_tolerance(jax.make_jaxpr(lambda x: x)(x))
    assert rounding_tolerance(jax.make_jaxpr(moved)(x)) == one_sum
