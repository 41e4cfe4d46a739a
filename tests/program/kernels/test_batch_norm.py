"""Batch norms and what relu kept: found, equal to the plain program, with fewer sums and bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.kernels.kernel_runs import assembled, assert_equal, both, differentiate, uses_in

from meshwright.step.step_program import planned_forward

CHANNELS = 8


class ByHand(nnx.Module):
    """A batch norm as it is written in papers."""

    def __init__(self, rngs):
        self.scale, self.bias = nnx.Param(jnp.ones(CHANNELS)), nnx.Param(jnp.zeros(CHANNELS))

    def __call__(self, x):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return self.scale[...] * (x - mean) / jnp.sqrt(variance + 1e-5) + self.bias[...]


class Plain(nnx.Module):
    """Subtracts a mean, and does nothing else."""

    def __init__(self, rngs):
        pass

    def __call__(self, x):
        return x - x.mean((0, 1, 2))


NORMS = {
    "flax": lambda rngs: nnx.BatchNorm(CHANNELS, rngs=rngs),
    "slow_variance": lambda rngs: nnx.BatchNorm(CHANNELS, use_fast_variance=False, rngs=rngs),
    "without_scale": lambda rngs: nnx.BatchNorm(CHANNELS, use_scale=False, rngs=rngs),
    "without_bias": lambda rngs: nnx.BatchNorm(CHANNELS, use_bias=False, rngs=rngs),
    "by_hand": ByHand,
}


class Net(nnx.Module):
    """Convolutions, each with a norm and a relu after it, that are added to what they read."""

    def __init__(self, names, rngs):
        self.names = names
        for name in names:
            conv = nnx.Conv(CHANNELS, CHANNELS, (3, 3), use_bias=False, rngs=rngs)
            setattr(self, f"{name}_conv", conv)
            setattr(self, name, (NORMS | {"plain": Plain})[name](rngs))

    def __call__(self, x):
        for name in self.names:
            x = nnx.relu(x + getattr(self, name)(getattr(self, f"{name}_conv")(x)))
        return x


def loss(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]).mean((1, 2)) - 1))


def batch(samples=8):
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(samples, 4, 4, CHANNELS)).astype(np.float32)}


def build(names):
    return lambda: Net(names, nnx.Rngs(0))


@pytest.mark.parametrize("mesh", ["data=1", "data=2,fsdp=2"])
def test_norms_and_relus_are_found_and_equal_the_plain_program(mesh):
    found, plain = both(build(tuple(NORMS)), loss, batch(), mesh=mesh)
    for name in NORMS:
        (use,) = uses_in(name, found.uses, "norm")
        assert (use.kernel, use.reason) == ("sums shared", "")
    # Nothing multiplies what the last one returns.
    relus = [use for use in found.uses if use.kind == "activation"]
    assert [use.kernel for use in relus] == ["by result"] * (len(NORMS) - 1)
    assert_equal(found, plain)


def test_a_mean_that_is_only_subtracted_is_left_alone():
    found = differentiate(build(("plain", "flax")), loss, batch(), "xla")
    assert not uses_in("plain", found.uses, "norm")


def test_the_gradient_of_a_norm_sums_the_rows_twice():
    def backward_sums(kernels):
        made = assembled(build(("flax",)), loss, batch(), kernels, wide=False)
        forward = planned_forward(made.traced, made.decision, made.plan, made.mesh)
        values = made.traced.layout.from_canonical(made.model_leaves.values(build(("flax",))()))

        def total(values):
            return forward(values, jax.tree.leaves(batch())).objective.total

        programs = [jax.make_jaxpr(f)(values) for f in (jax.grad(total), total)]
        backward, only_forward = (str(p).count("reduce_sum[axes=(0, 1, 2)") for p in programs)
        return backward - only_forward

    written, found = backward_sums("none"), backward_sums("xla")
    assert (written - found, found) == (1, 2)


def straight_through(x):
    """Rectifies like `jax.nn.relu`, with a gradient that lets everything through."""
    return jnp.maximum(x, 0)


straight_through = jax.custom_jvp(straight_through)
straight_through.defjvps(lambda t, out, x: t)


class Rectified(nnx.Module):
    """Products around functions with a derivative of their own."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(CHANNELS, CHANNELS, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        first, second, third, last = self.layers
        hidden = second(nnx.relu(first(x)))
        # Not read by a product.
        hidden = nnx.relu(hidden) + 1
        return last(straight_through(third(hidden)))


def test_only_relus_that_products_read_are_found():
    found, plain = both(lambda: Rectified(nnx.Rngs(0)), loss, batch())
    assert [use.kernel for use in found.uses if use.kind == "activation"] == ["by result"]
    assert_equal(found, plain)


def test_a_relu_in_a_loop_is_left_alone():
    """The loop would save its result twice."""

    class Loop(nnx.Module):
        def __init__(self, rngs):
            self.stack = nnx.Param(jax.random.normal(rngs.params(), (2, CHANNELS, CHANNELS)))

        def __call__(self, x):
            return jax.lax.scan(lambda x, w: (nnx.relu(x @ w) @ w, None), x, self.stack[...])[0]

    found = differentiate(lambda: Loop(nnx.Rngs(0)), loss, batch(), "xla")
    assert not [use for use in found.uses if use.kind == "activation"]
