"""Derived caches: logits of new tokens equal those of whole rows, or are recomputed and why."""

import jax
import numpy as np
import pytest
from flax import nnx
from generation.decoder_models import CACHED, RECOMPUTED, VOCABULARY, Decoder

from meshwright.config.compose import compose_config, validate
from meshwright.generation.make_decoder import make_decoder
from meshwright.generation.token_decoder import split_model
from meshwright.recipe import make_model_source

LENGTH, PROMPT = 24, 12
EVERY_DAY = ("written_out", "flax", "lstm", "without_padding", "shift")


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def largest_difference(model, vocabulary, length):
    """Return how far cached logits are from those of whole rows, in rows of several lengths."""
    split = split_model(model)
    decoder, weights = make_decoder(split, length), split.weights
    assert not decoder.reason
    tokens = np.random.default_rng(0).integers(0, vocabulary, (3, length)).astype(np.int32)
    whole = np.asarray(
        jax.jit(jax.vmap(lambda row: split.logits_of(weights, row[None])[0]))(tokens)
    )
    lengths = np.array([5, 9, 2], np.int32)
    prompts = np.where(np.arange(PROMPT) < lengths[:, None], tokens[:, :PROMPT], 7)
    weights = decoder.prepare(weights)
    logits, cache = jax.jit(decoder.start)(weights, prompts.astype(np.int32), lengths)
    worst = abs(np.asarray(logits) - whole[range(3), lengths - 1]).max()
    step = jax.jit(decoder.step)
    for ahead in range(length - lengths.min()):
        at = np.minimum(lengths + ahead, length - 1)
        logits, cache = step(weights, cache, tokens[range(3), at], at)
        rows = np.flatnonzero(lengths + ahead < length)
        worst = max(worst, abs(np.asarray(logits)[rows] - whole[rows, at[rows]]).max())
    return worst / abs(whole).max()


@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.full) for n in CACHED]
)
def test_cached_logits_equal_those_of_whole_rows(name):
    model = Decoder(CACHED[name], rngs=nnx.Rngs(0))
    assert largest_difference(model, VOCABULARY, LENGTH) < 1e-13


@pytest.mark.parametrize(("mix", "reason"), RECOMPUTED.values(), ids=RECOMPUTED)
def test_what_depends_on_later_positions_is_recomputed(mix, reason):
    decoder = make_decoder(split_model(Decoder(mix, rngs=nnx.Rngs(0))), LENGTH)
    assert reason in decoder.reason
    assert decoder.reason


def test_the_reason_names_operation_and_module():
    decoder = make_decoder(split_model(Decoder(RECOMPUTED["mean"][0], rngs=nnx.Rngs(0))), LENGTH)
    assert decoder.reason == "reduce_sum in mix mixes positions"


def test_a_model_that_takes_only_some_lengths_is_recomputed():
    chunks = RECOMPUTED["fourier"][0]

    class Chunked(Decoder):
        def __call__(self, tokens):
            assert tokens.shape[1] % 8 == 0, "lengths are multiples of 8"
            return super().__call__(tokens)

    decoder = make_decoder(split_model(Chunked(chunks, rngs=nnx.Rngs(0))), LENGTH)
    assert "called with 23 tokens" in decoder.reason
    assert "multiples of 8" in decoder.reason


FAMILIES = ("gpt2_nano", "llama3_tiny", "gemma3_tiny", "qwen3_tiny", "moe_tiny", "lstm_tiny",
            "stacked_gpt_tiny")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_cache(name):
    with jax.enable_x64(False):
        config = validate(compose_config([f"model={name}"]))
        model = make_model_source(config)(nnx.Rngs(0))
        assert largest_difference(model, 100, 62) < 3e-6
