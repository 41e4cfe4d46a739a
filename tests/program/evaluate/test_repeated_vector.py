"""Vectors repeated for every row, and gradients that are summed in two steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.program.evaluate.repeated_vector import parts_of, repeat_vector


@pytest.mark.parametrize(
    ("vector", "shape"),
    [
        ((24,), (4, 96, 24)),
        ((3, 8), (4, 96, 3, 8)),
        pytest.param((1, 1, 24), (4, 96, 24), marks=pytest.mark.full),
        pytest.param((24,), (640, 24), marks=pytest.mark.full),
        pytest.param((24,), (2, 3, 32, 24), marks=pytest.mark.full),
        ((24,), (4, 97, 24)),
        pytest.param((1,), (4, 96, 1), marks=pytest.mark.full),
        ((1,), (4, 96, 24)),
        ((24,), (24,)),
    ],
)
def test_values_and_gradients_are_those_of_broadcasting(vector, shape):
    with jax.enable_x64(True):
        given, weights = np.random.default_rng(0), np.random.default_rng(1)
        vector = jnp.asarray(given.normal(size=vector))
        factors = jnp.asarray(weights.normal(size=shape))

        def total(vector):
            repeated = repeat_vector(vector, shape)
            return (repeated * factors).sum(), repeated

        (_, repeated), gradient = jax.value_and_grad(total, has_aux=True)(vector)
        expected = jax.grad(lambda v: (jnp.broadcast_to(v, shape) * factors).sum())(vector)
        np.testing.assert_array_equal(repeated, jnp.broadcast_to(vector, shape))
        assert gradient.shape == vector.shape
        np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "shards", "parts"),
    [
        ((4, 1024), 1, 16),
        ((32, 1024), 1, 2),
        ((32, 1024), 8, 16),
        ((256, 197), 1, 1),
        ((4, 197), 1, 1),
        ((4096,), 1, 64),
        ((4096,), 8, None),
        ((7,), 1, None),
        ((1, 8), 1, None),
        ((), 1, None),
    ],
)
def test_about_64_sums_are_computed_side_by_side(rows, shards, parts):
    assert parts_of(rows, shards) == parts


def test_no_part_of_a_row_is_on_two_devices():
    assert parts_of((1, 4096), 8, of_positions=8) == 64
    assert parts_of((8, 63), 4, of_positions=4) is None
