"""What is saved of a program is the fewest bytes, and everything wanted follows from it."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from meshwright.pipeline.execute.least_saved import BARRIER, CHEAP, least_saved
from meshwright.pipeline.execute.stage_vjp import HeldValues, StageVJP
from meshwright.program.evaluate.dependencies import variables

ROWS, WIDTH = 8, 16


def size_of(variables):
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)


def follows(eqns, saved, wanted):
    """Whether the wanted variables can be computed from saved ones by cheap equations."""
    known = set(saved)
    for eqn in eqns:
        if eqn.primitive.name == BARRIER:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            known.update(result for operand, result in pairs if operand in known)
        if eqn.primitive.name in CHEAP and known.issuperset(variables(eqn.invars)):
            known.update(eqn.outvars)
    return known.issuperset(wanted)


def chain(x, kernel):
    """A wide value, a narrow one, and a cast: the cut is in the middle, not at either end."""
    product = x @ kernel
    half = product.astype(jnp.bfloat16)
    wide = jnp.tanh(half.astype(jnp.float32))
    return wide, jnp.exp(wide), jnp.concatenate([wide, -wide]), half > 0


def joined(x, kernel):
    """Two inputs of one result: saving the result is less than saving both."""
    left, right = jnp.sin(x @ kernel), (x * 2) @ kernel
    both = left * right
    return both + 1, jnp.exp(both)


def reduced(x, kernel):
    """A normalization: sums are kept, what is normalized is computed again."""
    y = x @ kernel
    mean = y.mean(-1, keepdims=True)
    centered = y - mean
    return centered, centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True))


def apart(x, kernel):
    """A barrier between several values ties none of them to what is made of another."""
    y, scale = jax.lax.optimization_barrier((x @ kernel, kernel[0]))
    return y, jnp.exp(y) * jnp.cumsum(scale)


@pytest.mark.parametrize("function", [chain, joined, reduced, apart])
def test_no_smaller_set_of_values_is_enough(function):
    x, kernel = jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, WIDTH))
    jaxpr = jax.make_jaxpr(function)(x, kernel).jaxpr
    wanted = list(dict.fromkeys(jaxpr.outvars))
    saved = least_saved(jaxpr.eqns, jaxpr.invars, wanted)
    assert follows(jaxpr.eqns, saved, wanted)
    everything = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    sets = itertools.chain.from_iterable(
        itertools.combinations(everything, count) for count in range(1, 4)
    )
    sufficient = [size_of(some) for some in sets if follows(jaxpr.eqns, some, wanted)]
    assert size_of(saved) == min(sufficient)


def test_what_is_at_hand_later_is_not_saved():
    x, kernel = jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, WIDTH))
    jaxpr = jax.make_jaxpr(lambda x, kernel: (kernel.T @ kernel, jnp.sin(x)))(x, kernel).jaxpr
    assert least_saved(jaxpr.eqns, jaxpr.invars[:1], jaxpr.outvars) == [jaxpr.outvars[1]]


def attention(weights, fixed, x, others):
    """One block in half precision, as language models have it."""
    query, up, down = (w.astype(jnp.bfloat16) for w in weights)
    projected = x @ query
    scores = (projected @ projected.mT).astype(jnp.float32) / 4
    mixed = jax.nn.softmax(jnp.where(scores > 9, -9, scores)).astype(jnp.bfloat16) @ projected
    return x + jax.nn.gelu((x + mixed) @ up) @ down, ()


def test_a_block_keeps_its_products_and_little_else():
    batch, length, width = 2, 64, 32
    x = jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16)
    kernels = [(width, width), (width, 4 * width), (4 * width, width)]
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in kernels]
    program = StageVJP(attention, HeldValues(weights), x, ())
    # In elements: input, query, mixed; the scores; the wide layer. In bytes: two each, and for
    # each row of scores the maximum and the sum.
    tokens = batch * length
    products = 2 * (3 * tokens * width + tokens * length + 4 * tokens * width)
    assert size_of_shapes(program.saved_shapes) <= products + 2 * 4 * tokens
    _, pullback = jax.eval_shape(
        lambda weights, x: jax.vjp(lambda w, x: attention(w, (), x, ())[0], weights, x), weights, x
    )
    residuals = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[:1] == (batch,)]
    assert 2 * size_of_shapes(program.saved_shapes) < size_of_shapes(residuals)


@jax.custom_jvp
def squashed(x):
    """A function that has its own derivative."""
    return jnp.tanh(x)


squashed.defjvps(lambda slope, value, _: slope * (1 - value**2))


def test_a_function_with_its_own_derivative_is_recomputed():
    def layer(weights, fixed, x, others):
        hidden = x @ weights[0]
        # Evaluated in a pass of its own, as kernels are.
        return jax.checkpoint(lambda h: squashed(h) * 2)(hidden) @ weights[1], ()

    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    weights = [
        jax.ShapeDtypeStruct((32, 128), jnp.float32),
        jax.ShapeDtypeStruct((128, 32), jnp.float32),
    ]
    program = StageVJP(layer, HeldValues(weights), x, ())
    assert size_of_shapes(program.saved_shapes) <= 4 * 64 * (32 + 128)


def size_of_shapes(shapes):
    return sum(shape.size * shape.dtype.itemsize for shape in shapes)
