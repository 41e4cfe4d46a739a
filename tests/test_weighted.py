"""Weighted means: parts add up, nothing counted is nothing lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.weighted import Weighted

pytestmark = pytest.mark.quick


def test_unequal_parts_add_up_to_the_mean_of_the_whole():
    values = np.random.default_rng(0).normal(size=10)
    parts = [
        Weighted(total=jnp.float32(part.sum()), weight=jnp.float32(part.size))
        for part in (values[:3], values[3:])
    ]
    whole = jax.tree.map(jnp.add, *parts)
    assert isinstance(whole, Weighted)
    np.testing.assert_allclose(whole.mean, values.mean(), rtol=1e-6)


def test_mean_of_nothing_is_zero_with_finite_gradient():
    def mean(scale):
        return Weighted(total=scale * 0.0, weight=jnp.float32(0)).mean

    value, gradient = jax.value_and_grad(mean)(jnp.float32(3))
    assert value == 0.0
    assert gradient == 0.0
