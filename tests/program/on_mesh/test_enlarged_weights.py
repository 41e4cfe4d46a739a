"""Biases of pairs of positions that are computed from fewer weights: numbers, and what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.kernels.kernel_runs import assembled, assert_equal, differentiate

import meshwright as mw
from meshwright.ledgers import make_ledger
from meshwright.program.kernels import attention_by_rows

LENGTH, HEADS, WIDTH, SAMPLES = 16, 4, 8, 8
BACK = np.arange(LENGTH)[:, None] - np.arange(LENGTH)


class Block(nnx.Module):
    """Attention with a bias of its own, or one that it is given."""

    def __init__(self, kind, rngs):
        self.kind = kind
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        shape = (HEADS, 1, 1) if kind == "slopes" else (HEADS, LENGTH)
        if kind != "shared":
            self.weights = nnx.Param(jax.random.normal(rngs.params(), shape))

    def __call__(self, x, bias):
        if self.kind == "slopes":
            bias = -jnp.exp(self.weights[...]) * BACK
        if self.kind == "distances":
            bias = self.weights[...][:, np.maximum(BACK, 0)]
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = (qkv[:, :, n] for n in range(3))
        scores = jnp.einsum("bthc,bshc->bhts", q, k) + bias
        weights = jax.nn.softmax(jnp.where(BACK >= 0, scores, -1e9))
        mixed = jnp.einsum("bhts,bshc->bthc", weights, v)
        return x + self.out(mixed.reshape(x.shape))


class Model(nnx.Module):
    """Three blocks, and a bias for each distance that they may share."""

    def __init__(self, kind, rngs):
        self.blocks = nnx.List([Block(kind, rngs) for _ in range(3)])
        self.distances = nnx.Embed(LENGTH, HEADS, rngs=rngs) if kind == "shared" else None

    def __call__(self, x):
        bias = None
        if self.distances is not None:
            bias = self.distances(np.maximum(BACK, 0)).transpose(2, 0, 1)
        for block in self.blocks:
            x = block(x, bias)
        return x


def loss(model, batch):
    """Return a mean over samples."""
    return jnp.mean(jnp.sin(model(batch["x"])))


def given(kind):
    """Return how a model is built, its loss and a batch."""
    x = np.random.default_rng(0).normal(size=(SAMPLES, LENGTH, WIDTH)).astype(np.float32)
    return lambda: Model(kind, nnx.Rngs(0)), loss, {"x": x}


@pytest.mark.parametrize(
    ("kind", "kernels", "remat"),
    [
        pytest.param("distances", "none", "none", marks=pytest.mark.full),
        ("distances", "xla", "none"),
        pytest.param("slopes", "none", "none", marks=pytest.mark.full),
        ("slopes", "xla", "none"),
        ("shared", "none", "dots"),
        ("shared", "xla", "full"),
        pytest.param("shared", "xla", "none", marks=pytest.mark.full),
    ],
)
def test_gradients_of_the_weights_alone_are_reduced(kind, kernels, remat):
    sharding = mw.ShardingConfig(remat=remat)
    own = assembled(*given(kind), kernels, wide=False, mesh="data=4", sharding=sharding)
    assert 0.99 <= make_ledger(own, given(kind)[2]).axes["data"].ratio <= 1.01


@pytest.mark.parametrize(
    ("kind", "mesh", "remat"),
    [
        ("distances", "data=2,tensor=2", "none"),
        pytest.param("slopes", "fsdp=2,tensor=2", "none", marks=pytest.mark.full),
        ("shared", "data=2,fsdp=2", "full"),
        pytest.param("shared", "data=4", "none", marks=pytest.mark.full),
        pytest.param("distances", "fsdp=4", "dots", marks=pytest.mark.full),
    ],
)
def test_kernels_on_meshes_have_the_numbers_of_one_device(kind, mesh, remat, monkeypatch):
    monkeypatch.setattr(attention_by_rows, "ROWS", 5)
    config = mw.ShardingConfig(min_shard_size=0, remat=remat)
    found = differentiate(*given(kind), "xla", mesh=mesh, sharding=config)
    assert {use.kernel for use in found.uses if use.kind == "attention"} == {"xla"}
    assert_equal(found, differentiate(*given(kind), "none"))
