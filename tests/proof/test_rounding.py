"""The tolerance of rounding covers what float32 does, and little more."""

import jax
import jax.numpy as jnp
import numpy as np
from program.programs import quick

from meshwright.proof.rounding import rounding_tolerance


def deep(x, scale):
    """Norms and activations without a single product of matrices."""

    def layer(x, _):
        return jnp.tanh(x * scale) / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3), None

    x, _ = jax.lax.scan(layer, x, None, length=40)
    return (x**2).mean()


def test_arithmetic_between_products_counts():
    random = np.random.default_rng(0)
    x, scale = random.normal(size=(8, 16)), 1 + 0.1 * random.normal(size=16)
    narrow = [np.asarray(a, np.float32) for a in (x, scale)]
    tolerance = rounding_tolerance(jax.make_jaxpr(deep)(*narrow))
    with jax.enable_x64(True):
        exact = quick(jax.grad(deep, 1))(*[a.astype(np.float64) for a in narrow])
        exact = np.asarray(exact)
    found = quick(jax.grad(deep, 1))(*narrow)
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert 0 < error <= tolerance
    assert tolerance < 1e-5


def test_moving_numbers_does_not_round_them():
    def moved(x):
        return jnp.concatenate([x.T[::-1], x.T], axis=1).reshape(-1)[3:]

    x = np.ones((4, 4), np.float32)
    one_sum = rounding_tolerance(jax.make_jaxpr(lambda x: x)(x))
    assert rounding_tolerance(jax.make_jaxpr(moved)(x)) == one_sum
