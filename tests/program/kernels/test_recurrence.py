"""Loops over positions: their products of weights are taken out, and numbers stay the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from program.kernels.kernel_runs import (
    Forms,
    assert_equal,
    both,
    differentiate,
    uses_in,
)

import meshwright as mw

WIDTH, ROWS, POSITIONS = 16, 4, 9


class Written(nnx.Module):
    """A recurrence written by hand, by a function of its weights, the state, and a slice."""

    def __init__(self, step, rngs, dtype):
        self.step, self.dtype = step, dtype
        self.kernels = nnx.Param(0.3 * jax.random.normal(rngs.params(), (3, WIDTH, WIDTH)))
        self.scale = nnx.Param(jnp.linspace(0.5, 1, WIDTH))

    def __call__(self, x):
        x = x.astype(self.dtype)
        weights = (*self.kernels[...].astype(x.dtype), self.scale[...].astype(x.dtype))
        start = jnp.zeros_like(x[:, 0]), jnp.int32(0)
        numbered = (x.swapaxes(0, 1), jnp.arange(x.shape[1]))
        (last, _), states = lax.scan(
            lambda carry, slices: self.step(weights, carry, slices), start, numbered, reverse=True
        )
        return states.swapaxes(0, 1) + last[:, None]


def plain(weights, carry, slices):
    (state, count), (x, _) = carry, slices
    state = jnp.tanh(state @ weights[0] + x @ weights[1].T)
    return (state, count + 1), state


def shared(weights, carry, slices):
    """One weight is read by two products, one product by nothing, and positions are counted."""
    (state, count), (x, number) = carry, slices
    gate = jax.nn.sigmoid((state * weights[3]) @ weights[0] + weights[3])
    new = jnp.tanh((gate * state) @ weights[1] + x @ weights[1])
    dead = state @ weights[2]
    del dead
    state = jnp.where(number % 2 == count % 2, gate * state + (1 - gate) * new, state)
    return (state, count + number), state + x @ weights[0]


def both_at_once(weights, carry, slices):
    """The state and the slice are joined, so that no product can be taken out."""
    (state, count), (x, _) = carry, slices
    kernel = jnp.concatenate(weights[:2]) * 0.5
    state = jnp.tanh(jnp.concatenate([x, state], -1) @ kernel)
    return (state, count), state @ weights[2]


def by_cell(cell, **options):
    return lambda rngs, dtype: nnx.RNN(cell(WIDTH, WIDTH, dtype=dtype, rngs=rngs), **options)


FORMS = {
    "lstm": by_cell(nnx.LSTMCell, unroll=3),
    "optimized_lstm": by_cell(nnx.OptimizedLSTMCell),
    "gru": by_cell(nnx.GRUCell, reverse=True, keep_order=True),
    "simple": by_cell(nnx.SimpleCell, time_major=True),
    "plain": functools.partial(Written, plain),
    "shared": functools.partial(Written, shared),
    "both_at_once": functools.partial(Written, both_at_once),
}


def build(names=tuple(FORMS), dtype=jnp.float32):
    kinds = {name: functools.partial(FORMS[name], dtype=dtype) for name in names}
    return lambda: Forms(kinds, rngs=nnx.Rngs(0))


def squares(model, batch):
    outputs = [getattr(model, name)(batch["x"]).astype(jnp.float32) for name in model.names]
    return sum((output**2).mean() for output in outputs)


@pytest.fixture(scope="module")
def batch():
    x = np.random.default_rng(0).normal(size=(ROWS, POSITIONS, WIDTH))
    return {"x": x.astype(np.float32)}


EVERYDAY = ("lstm", "gru", "shared", "both_at_once")
"""Unrolled, in reverse, and written out: with products that can be taken out, and without."""


@pytest.mark.parametrize("names", [EVERYDAY, pytest.param(tuple(FORMS), marks=pytest.mark.full)])
def test_numbers_and_gradients_are_those_of_the_loop_as_written(batch, names):
    fused, written = both(build(names), squares, batch)
    assert_equal(fused, written)
    for name in names:
        (use,) = uses_in(name, fused.uses, "recurrence")
        assert use.kernel == "weights outside of the loop", use
    assert not written.uses


@pytest.mark.full
def test_half_precision_is_as_exact_as_written_out(batch):
    names = ("lstm", "shared", "both_at_once")
    exact = differentiate(build(names), squares, batch, "none")
    half = build(names, jnp.bfloat16)
    runs = [differentiate(half, squares, batch, kernels, wide=False) for kernels in ("xla", "none")]
    for path, expected in exact.gradients.items():
        ours, written = (np.abs(run.gradients[path] - expected).max() for run in runs)
        assert ours <= 1.5 * written + 0.002 * np.abs(expected).max(), path


@pytest.mark.parametrize("names", [("shared",), pytest.param(("gru",), marks=pytest.mark.full)])
def test_recomputed_gradients_are_the_same(batch, names):
    fused, written = both(build(names), squares, batch, sharding=mw.ShardingConfig(remat="full"))
    assert_equal(fused, written)


def test_many_rows_and_meshes_stay_as_written(batch):
    many = {"x": np.tile(batch["x"], (8, 1, 1))}
    run = differentiate(build(("gru",)), squares, many, "xla")
    (use,) = uses_in("gru", run.uses, "recurrence")
    assert use.reason == "its 32 rows are more than the 16 of a weight"
    run = differentiate(build(("gru",)), squares, batch, "xla", mesh="data=2")
    (use,) = uses_in("gru", run.uses, "recurrence")
    assert use.reason == "the mesh shards its state"
