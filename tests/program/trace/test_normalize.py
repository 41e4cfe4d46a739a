"""The normal form has no calls and no transposed weights, and computes the same numbers."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from program.programs import equations, trace
from small_models import builder, numbers, task_batch

from meshwright.program.jaxpr.equations import CALLS
from meshwright.program.trace.normalize import normalize

X = numbers(2, 3)


def run(closed):
    return jax.jit(jax.extend.core.jaxpr_as_fun(closed))


def test_no_call_is_left_and_no_bit_is_changed():
    @jax.jit
    def inner(x):
        return jax.jit(jnp.sin)(x) + jax.nn.gelu(x)

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (inner(c), c), inner(x), length=2))(
        X
    )
    normal = normalize(closed)
    assert CALLS & {e.primitive.name for e, _ in equations(closed.jaxpr)}
    assert not CALLS & {e.primitive.name for e, _ in equations(normal.jaxpr)}
    for ours, theirs in zip(run(normal)(X), run(closed)(X), strict=True):
        assert jnp.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("ab,cb->ac", (2, 3), (4, 3)),
        pytest.param("ba,bc->ac", (3, 2), (3, 4), marks=pytest.mark.full),
        pytest.param("nab,ncb->nac", (5, 2, 3), (5, 4, 3), marks=pytest.mark.full),
        ("abh,hbc->ach", (2, 3, 5), (5, 3, 4)),
        ("abcd,dcb->a", (2, 3, 4, 5), (5, 4, 3)),
    ],
)
def test_products_of_transposed_arrays_stay_the_same(equation, left, right):
    def product(a, b):
        flip = lambda x: jnp.transpose(jnp.transpose(x) * 2)  # noqa: E731
        return jnp.einsum(equation, flip(a), jnp.transpose(b).T), a.T @ a if a.ndim == 2 else a

    inputs = numbers(*left), numbers(*right, seed=1)
    closed = jax.make_jaxpr(product)(*inputs)
    for ours, theirs in zip(run(normalize(closed))(*inputs), run(closed)(*inputs), strict=True):
        assert ours.shape == theirs.shape
        assert jnp.allclose(ours, theirs, rtol=1e-5)


def test_a_tied_embedding_is_multiplied_as_it_is_stored():
    model_leaves, traced = trace(builder("gpt"), *task_batch("gpt"))
    (number,) = (n for n, leaf in enumerate(model_leaves.leaves) if "tokens" in leaf.path)
    table = traced.closed.jaxpr.invars[number]
    assert any(
        e.primitive.name == "dot_general" and table in e.invars for e in traced.closed.jaxpr.eqns
    )
