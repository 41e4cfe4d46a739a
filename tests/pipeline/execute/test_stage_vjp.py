"""A backward that runs later, whole or in halves, gives the gradients of `jax.vjp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.pipeline.execute.stage_vjp import HeldValues, StageVJP
from meshwright.program.evaluate.repeated_vector import repeat_vector


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def layers(weights, fixed, x, others):
    """Three residual layers; weights are rounded before use, as in half precision."""
    for up, down in weights:
        rounded = up.astype(jnp.float32).astype(jnp.float64)
        x = x + jnp.tanh(x @ rounded) @ down * fixed * others
    return x, x.sum()


def rematerialized(weights, fixed, x, others):
    return jax.checkpoint(layers)(weights, fixed, x, others)


def values():
    random = np.random.default_rng(0)
    weights = [(random.normal(size=(4, 6)), random.normal(size=(6, 4))) for _ in range(3)]
    return weights, random.normal(size=4), random.normal(size=(2, 4)), random.normal(size=(2, 4))


@pytest.mark.parametrize("function", [layers, rematerialized])
def test_whole_and_in_halves_it_equals_vjp(function):
    weights, fixed, x, others = values()
    held = HeldValues(weights, fixed)
    program = StageVJP(function, held, x, others)
    result = program.forward(held, x, others)
    ct = np.cos(result.y)
    expected_y, pullback = jax.vjp(lambda w, x: function(w, fixed, x, others)[0], weights, x)
    expected = pullback(jnp.asarray(ct))
    whole = program.backward(held, result.saved, ct)
    dx, cut = program.input_gradient(held, result.saved, ct)
    halves = program.weight_gradient(held, result.saved, cut), dx
    np.testing.assert_allclose(result.y, expected_y, rtol=1e-13)
    np.testing.assert_allclose(result.further, result.y.sum(), rtol=1e-13)
    for found in (whole, halves):
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_weights_and_their_casts_are_not_kept():
    weights, fixed, x, others = values()
    program = StageVJP(layers, HeldValues(weights, fixed), x, others)
    kept = [shape.shape for shape in program.saved_shapes]
    assert kept
    assert all(shape[0] == 2 for shape in kept), kept


def products(program, arguments):
    return str(jax.make_jaxpr(program)(*arguments)).count("dot_general")


def test_each_half_of_a_chain_has_half_of_the_products():
    weights, fixed, x, others = values()
    held = HeldValues(weights, fixed)
    program = StageVJP(layers, held, x, others)
    result = program.forward(held, x, others)
    _, cut = program.input_gradient(held, result.saved, result.y)
    call = (held, result.saved)
    assert products(program.backward, (*call, result.y)) == 12
    assert products(program.input_gradient, (*call, result.y)) == 6
    assert products(program.weight_gradient, (*call, cut)) == 6


def normalized(weights, fixed, x, others):
    for scale, kernel in weights:
        x = x + jnp.tanh(x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + fixed) * scale) @ kernel
    return x, others


def test_sums_that_need_more_than_the_products_belong_to_the_first_half():
    random = np.random.default_rng(0)
    weights = [(random.normal(size=4), random.normal(size=(4, 4))) for _ in range(2)]
    x, ct = random.normal(size=(2, 3, 4)), random.normal(size=(2, 3, 4))
    program = StageVJP(normalized, HeldValues(weights, 1.0), x, ())

    @jax.jit
    def both(weights, x, ct):
        held = HeldValues(weights, 1.0)
        saved = program.forward(held, x, ()).saved
        dx, cut = program.input_gradient(held, saved, ct)
        _, pullback = jax.vjp(lambda w, x: normalized(w, 1.0, x, ())[0], weights, x)
        return (program.weight_gradient(held, saved, cut), dx), pullback(ct)

    found, expected = both(weights, x, ct)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    # The gradient of each kernel's result, and that of each scale.
    shapes = sorted(shape.shape for shape in program.cut_shapes)
    assert shapes == [(2, 3, 4), (2, 3, 4), (4,), (4,)]


def test_sums_in_two_steps_stay_two_steps_in_halves():
    random = np.random.default_rng(0)
    bias, x, ct = (
        random.normal(size=4),
        random.normal(size=(8, 64, 4)),
        random.normal(size=(8, 64, 4)),
    )

    def function(bias, fixed, x, others):
        return x * fixed + repeat_vector(bias, x.shape), others

    held = HeldValues(bias, 2.0)
    program = StageVJP(function, held, x, ())
    saved = program.forward(held, x, ()).saved

    def halves(saved, ct):
        dx, cut = program.input_gradient(held, saved, ct)
        return dx, program.weight_gradient(held, saved, cut)

    assert str(jax.make_jaxpr(halves)(saved, ct)).count("optimization_barrier") == 1
    _, found = halves(saved, ct)
    np.testing.assert_allclose(found, ct.sum((0, 1)), rtol=1e-12)
