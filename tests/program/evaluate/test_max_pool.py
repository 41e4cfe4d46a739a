"""The largest number of each window and its gradient, against JAX's own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.evaluate.half_functions import HalfFunctions

IMAGE = ((0, 0), (1, 1), (1, 1), (0, 0))
CASES = {
    "of a ResNet": ((2, 9, 11, 3), (1, 3, 3, 1), (1, 2, 2, 1), IMAGE),
    "apart": ((2, 8, 8, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "channels first": ((2, 3, 9, 8), (1, 1, 3, 3), (1, 1, 1, 1), "SAME"),
    "positions between": ((2, 10, 3), (1, 2, 1), (1, 3, 1), "VALID"),
    "three dims": ((1, 5, 6, 7, 2), (1, 2, 2, 2, 1), (1, 2, 1, 2, 1), "SAME"),
    "uneven": ((2, 7, 7, 2), (1, 4, 4, 1), (1, 2, 3, 1), ((0, 0), (2, 0), (0, 3), (0, 0))),
}


def pooled(x, window, strides, padding, **options):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding, **options)


def evaluated(function, x):
    """Return the function as it is evaluated on GPUs."""
    closed = jax.make_jaxpr(function)(x)
    return lambda x: Evaluator(numerics=HalfFunctions()).run(closed, [x])[0]


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "bfloat16") for case in CASES), ("of a ResNet", "float16")]
)
def test_results_and_gradients_are_those_of_the_operation(case, dtype):
    shape, *window = CASES[case]
    # Of equal numbers, the first one has the gradient; small integers are exact in any sum.
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape), dtype)
    function = evaluated(lambda x: pooled(x, *window), x)
    expected, gradient = value_and_gradient(lambda x: pooled(x, *window), x)
    found, gradient_found = value_and_gradient(function, x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(gradient_found, gradient)
    program = str(jax.make_jaxpr(jax.grad(lambda x: function(x).sum()))(x))
    assert "reduce_window" not in program
    assert "select_and_scatter" not in program


@partial(jax.jit, static_argnums=0)
def value_and_gradient(function, x):
    """Return the result, and the gradient of a sum of its numbers times -3 to 3."""
    result, pull = jax.vjp(function, x)
    factors = jnp.arange(result.size).reshape(result.shape) % 7 - 3
    return result, pull(factors.astype(x.dtype))[0]


def test_nan_and_infinity_are_largest_where_they_are():
    x = jnp.array([[1, jnp.nan, 2, 0, jnp.nan, 5, -jnp.inf, jnp.inf]], jnp.bfloat16)[..., None]
    found = evaluated(lambda x: pooled(x, (1, 2, 1), (1, 2, 1), "VALID"), x)(x)
    expected = [np.nan, 2, np.nan, np.inf]
    np.testing.assert_array_equal(found.astype(jnp.float32).ravel(), expected)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("bfloat16", {"window_dilation": (1, 2, 1)}), ("bfloat16", {"size": 17})],
    ids=["float32", "dilated", "large"],
)
def test_others_stay_as_they_are(dtype, options):
    x = jnp.zeros((2, 40, 3), dtype)
    window = (1, options.pop("size", 2), 1)
    run = evaluated(lambda x: pooled(x, window, (1, 1, 1), "VALID", **options), x)
    assert "reduce_window_max" in str(jax.make_jaxpr(run)(x))
