"""Functions of half-precision numbers in few instructions: their errors, slopes, and use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from meshwright.program.evaluate import half_functions
from meshwright.program.evaluate.evaluator import Evaluator

EXACT = {"erfc": special.erfc, "erf": special.erf, "tanh": np.tanh}
SLOPES = {
    "erfc": lambda x: -2 / np.sqrt(np.pi) * np.exp(-x * x),
    "erf": lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x),
    "tanh": lambda x: 1 - np.tanh(x) ** 2,
}
HALF_STEP = 2.0**-12
"""Half of the distance of two numbers with 11 bits, of 1."""


@pytest.mark.parametrize("name", EXACT)
def test_errors_are_far_below_the_steps_of_half_precision(name):
    sizes = np.concatenate([np.geomspace(1e-30, 9, 40_000), [0.0, 30.0, 1e4]])
    x = np.concatenate([-sizes, sizes]).astype(np.float32)
    found = np.asarray(jax.jit(getattr(half_functions, name))(x), np.float64)
    exact = EXACT[name](x.astype(np.float64))
    assert (np.abs(found - exact) <= HALF_STEP / 2 * np.abs(exact) + 1e-37).all()


@pytest.mark.parametrize("name", EXACT)
def test_slopes_are_those_of_the_function(name):
    x = np.linspace(-6, 6, 2001, dtype=np.float32)
    slopes = jax.jit(jax.vmap(jax.grad(getattr(half_functions, name))))(x)
    exact = SLOPES[name](x.astype(np.float64))
    np.testing.assert_allclose(slopes, exact, rtol=HALF_STEP, atol=1e-6)


@pytest.mark.parametrize(("dtype", "replaced"), [("bfloat16", True), ("float32", False)])
def test_only_half_precision_is_computed_so(dtype, replaced):
    x = jnp.linspace(-3, 3, 64, dtype=dtype)
    closed = jax.make_jaxpr(lambda x: jax.nn.gelu(x, approximate=False))(x)
    evaluator = Evaluator(numerics=half_functions.HalfFunctions())
    program = jax.make_jaxpr(lambda x: evaluator.run(closed, [x])[0])(x)
    assert ("erfc " in str(program)) != replaced
    (found,), (plain,) = evaluator.run(closed, [x]), Evaluator().run(closed, [x])
    assert found.dtype == dtype
    np.testing.assert_allclose(*(y.astype(jnp.float32) for y in (found, plain)), rtol=2.0**-7)
