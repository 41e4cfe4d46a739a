"""MoEGPT: experts mixed by a softmax router."""

import numpy as np
import pytest
from flax import nnx

from meshwright.models.moe import Experts, MoEGPT


def gelu(x):
    """The tanh form of the paper, in float64."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("num_experts", [1, 3])
def test_experts_equal_a_loop_over_them(fill, num_experts):
    sizes = {"hidden_size": 6, "num_experts": num_experts, "expert_size": 5, "out_std": 0.5}
    experts = fill(lambda: Experts(**sizes, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(2, 4, 6))
    router, up, down = (
        np.asarray(variable[...], np.float64)
        for variable in (experts.router.kernel, experts.up, experts.down)
    )
    scores = np.exp(x @ router)
    gates = scores / scores.sum(axis=-1, keepdims=True)
    expected = sum(gates[..., [e]] * (gelu(x @ up[e]) @ down[e]) for e in range(num_experts))
    got = nnx.jit(lambda experts, x: experts(x))(experts, x.astype(np.float32))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_later_tokens_do_not_change_earlier_logits(fill):
    sizes = {"hidden_size": 16, "num_heads": 2, "num_experts": 2, "expert_size": 8}
    model = fill(
        lambda: MoEGPT(vocab_size=32, context_length=8, num_blocks=1, **sizes, rngs=nnx.Rngs(0))
    )
    model.eval()
    run = nnx.jit(lambda model, tokens: model(tokens))
    tokens = np.random.default_rng(0).integers(32, size=(2, 8)).astype(np.int32)
    changed = tokens.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    before, after = run(model, tokens), run(model, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.abs(before[:, 5:] - after[:, 5:]).max(axis=-1) > 1e-6)
