"""Which weights a gradient depends on, against derivatives written out by hand."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from program.programs import trace
from small_models import WIDTH, Residuals, square_loss, vectors

from meshwright.program.weight_reads import weights_in_backward

pytestmark = pytest.mark.quick


class Chain(nnx.Module):
    """x·A·s + b, looked up rows added, then ·B in a loop, then exp(c)."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.rows = nnx.Embed(4, WIDTH, rngs=rngs)
        self.b = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.c = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        y = self.a(x) * self.scale[...] + self.rows(jnp.zeros(x.shape[0], jnp.int32))
        y, _ = jax.lax.scan(lambda y, _: (self.b(y), None), y, length=2)
        return y + jnp.exp(self.c[...])


def found(build, **options):
    _, traced = trace(build, square_loss, vectors(), **options)
    steps = traced.layout.step_leaves
    return {steps[number].leaf.path for number in weights_in_backward(traced)}


@pytest.mark.parametrize("compute", [None, jnp.bfloat16])
def test_a_factor_is_read_if_what_it_multiplies_has_a_gradient(compute):
    # d(x·A) needs x alone; d(y·s) needs y and s; sums and lookups need nothing; d(exp c) needs c.
    assert found(Chain, compute_dtype=compute) == {"scale", "b.kernel", "c"}


def test_a_factor_of_untrained_values_is_not_read():
    only = nnx.All(nnx.Param, nnx.PathContains("b"))
    # A loop's first turn is given no gradient, its second is.
    assert found(Chain, trainable=only) == {"b.kernel"}


def test_blocks_behind_the_first_read_every_kernel_again():
    assert found(Residuals) == {
        "blocks.0.down.kernel",
        "blocks.1.down.kernel",
        "blocks.1.up.kernel",
    }
    # A stack is read again as soon as one of its blocks is.
    assert found(Residuals, rolled=True) == {"blocks.*.down.kernel", "blocks.*.up.kernel"}
