"""Where cuDNN has no kernel for an attention, it stays as written, with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.kernels.kernel_runs import assembled

from meshwright.program.kernels import fused_attention
from meshwright.program.kernels.find_kernels import KernelSearch, find_kernels
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
        ({"length": 197}, "cuDNN has no kernel for it: Unsupported sequence length Q 197."),
        ({"channels": 12}, "a multiple of 8, not 12"),
        ({"precision": "no"}, "it needs bf16 or fp16, not float32"),
    ],
)
def test_what_it_does_not_take_stays_as_written(cudnn, sizes, reason):
    use = use_on_gpu(**sizes)
    assert (use.kernel, reason in use.reason) == ("", True), use.reason


def test_plans_for_absent_gpus_count_on_even_lengths_only():
    assert use_on_gpu(planned=True).kernel == "cudnn"
    odd = use_on_gpu(length=197, planned=True)
    assert (odd.kernel, odd.reason) == ("", "it needs rows of even length, not 197")
