"""Where cuDNN has no kernel for an attention, it stays as written, with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.kernels.kernel_runs import assembled

from meshwright.program.kernels import fused_attention
from meshwright.program.kernels.find_kernels import KernelSearch, find_kernels
from meshwright.program.kernels.masks import Allowed
from meshwright.sharding.decide import dim_classes

HEADS, WIDTH = 2, 8


class Attention(nnx.Module):
    """A projection, and attention by JAX."""

    def __init__(self, channels):
        self.channels = channels
        self.qkv = nnx.Linear(WIDTH, 3 * HEADS * channels, rngs=nnx.Rngs(0))

    def __call__(self, x):
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, self.channels)
        q, k, v = (qkv[:, :, n] for n in range(3))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def use_on_gpu(precision="bf16", length=6, channels=8, *, planned=False):
    """Return what is found in a step for GPUs."""
    batch = {"x": np.zeros((2, length, WIDTH), np.float32)}
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    build = lambda: Attention(channels)  # noqa: E731
    traced = assembled(build, loss, batch, "none", wide=False, precision=precision).traced
    search = KernelSearch("auto", "gpu", planned=planned)
    found = find_kernels(traced, dim_classes(traced), lambda program, variable: None, search)
    (use,) = [use for use in found.uses if use.kind == "attention"]
    return use


@pytest.fixture
def cudnn(monkeypatch):
    """A stand-in with the limits of one release, since cuDNN needs a GPU."""

    def attend(query, key, value, *, implementation, **options):
        assert implementation == "cudnn"
        if query.shape[1] % 2:
            raise NotImplementedError(f"Unsupported sequence length Q {query.shape[1]}.\nMore.")
        if query.shape[3] == 24:
            raise NotImplementedError("Unsupported head dim 24.\nMore.")
        return jax.nn.softmax(query, axis=-1) * key * value

    monkeypatch.setattr(fused_attention, "dot_product_attention", attend)
    fused_attention._refusal.cache_clear()
    yield
    fused_attention._refusal.cache_clear()


def test_what_cudnn_takes_is_replaced(cudnn):
    assert (use_on_gpu().kernel, use_on_gpu().detail) == ("cudnn", "causal")


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"channels": 24}, "cuDNN has no kernel for it: Unsupported head dim 24."),
        ({"channels": 12}, "a multiple of 8, not 12"),
        ({"precision": "no"}, "it needs bf16 or fp16, not float32"),
    ],
)
def test_what_it_does_not_take_stays_as_written(cudnn, sizes, reason):
    use = use_on_gpu(**sizes)
    assert (use.kernel, reason in use.reason) == ("", True), use.reason


@pytest.mark.parametrize("planned", [False, True])
def test_rows_of_odd_length_are_filled_up(cudnn, planned):
    assert use_on_gpu(length=197, planned=planned).kernel == "cudnn"


@pytest.mark.parametrize(
    ("allowed", "queries", "keys", "mask"),
    [
        pytest.param(Allowed(), 5, 5, False, marks=pytest.mark.full),
        (Allowed(), 4, 7, False),
        pytest.param(Allowed(), 7, 4, True, marks=pytest.mark.full),
        (Allowed(least=0), 5, 5, True),
        pytest.param(Allowed(least=0), 7, 5, False, marks=pytest.mark.full),
        (Allowed(least=0, window=3), 7, 7, False),
    ],
)
def test_filled_rows_change_nothing(monkeypatch, allowed, queries, keys, mask):
    """Results and gradients of attention in JAX's own operations, in float64."""
    lengths = []

    def by_xla(query, key, value, *, implementation, **options):
        lengths.extend((query.shape[1], key.shape[1]))
        return jax.nn.dot_product_attention(query, key, value, **options)

    monkeypatch.setattr(fused_attention, "dot_product_attention", by_xla)
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        shapes = [(2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8), (2, queries, 4, 8)]
        query, key, value, cotangent = (random.normal(size=shape) for shape in shapes)
        seen = np.array(fused_attention.band(allowed, (queries, keys)))
        if mask:
            seen = seen & (random.random((2, 1, queries, keys)) < 0.7)
            seen[..., 0] = True
        seen = np.broadcast_to(seen, (2, 1, queries, keys))
        attend = fused_attention.cudnn_attention(allowed, 0.3)
        own = lambda *qkv: attend(*qkv, jnp.array(seen) if mask else None)  # noqa: E731
        plain = lambda *qkv: jax.nn.dot_product_attention(*qkv, mask=seen, scale=0.3)  # noqa: E731

        @jax.jit
        def both(*qkv):
            out = [
                (out, *pull(cotangent)) for out, pull in (jax.vjp(f, *qkv) for f in (own, plain))
            ]
            return list(zip(*out, strict=True))

        for found, expected in both(query, key, value):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert not any(length % 2 for length in lengths)
