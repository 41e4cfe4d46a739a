"""StackedGPT: the same function as GPT, with the blocks on a leading dim."""

import jax
import numpy as np
import pytest
from flax import nnx

from meshwright.models.gpt import GPT
from meshwright.models.stacked import StackedGPT

SIZES = {"vocab_size": 32, "context_length": 8, "num_blocks": 3, "hidden_size": 16, "num_heads": 4}
TOKENS = np.random.default_rng(0).integers(32, size=(2, 8)).astype(np.int32)


@pytest.fixture(scope="module")
def pair(fill):
    """A GPT and a StackedGPT holding its weights."""
    plain, stacked = (
        fill(lambda kind=kind: kind(**SIZES, num_kv_heads=2, dropout=0.3, rngs=nnx.Rngs(0)))
        for kind in (GPT, StackedGPT)
    )
    blocks = [nnx.state(block, nnx.Param) for block in plain.blocks]
    nnx.update(stacked.blocks, jax.tree.map(lambda *leaves: np.stack(leaves), *blocks))
    nnx.update(stacked.vocabulary, nnx.state(plain.vocabulary, nnx.Param))
    return plain, stacked


def test_equals_gpt_with_the_same_weights(pair):
    segments = np.array([[1] * 3 + [2] * 5] * 2, dtype=np.int32)
    outputs = []
    for model in pair:
        model.eval()
        run = nnx.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))
        outputs.append(np.asarray(run(model, TOKENS, segments)))
    plain, stacked = outputs
    np.testing.assert_allclose(stacked, plain, atol=1e-6 * np.abs(plain).max())


def test_every_block_starts_different_and_has_its_own_random_stream():
    rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))
    model = StackedGPT(**SIZES, dropout=0.5, rngs=rngs)
    kernel = np.asarray(model.blocks.mlp.up.kernel[...])
    assert kernel.shape == (3, 16, 64)
    assert np.abs(kernel[0] - kernel[1]).max() > 1e-3
    keys = jax.random.key_data(model.blocks.dropout.rngs.key[...])
    assert len({tuple(key) for key in np.asarray(keys).tolist()}) == 3


def test_training_draws_new_dropout_in_every_call(fill):
    model = fill(lambda: StackedGPT(**SIZES, dropout=0.5, rngs=nnx.Rngs(0)))
    run = nnx.jit(lambda model, tokens: model(tokens))
    assert np.abs(run(model, TOKENS) - run(model, TOKENS)).max() > 1e-3
