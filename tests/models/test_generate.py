"""Generation: greedy is the argmax of the model, seeds repeat, the model stays as it was."""

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from meshwright.models.generate import generate
from meshwright.models.gpt import GPT

CONTEXT = 6
PROMPT = np.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]], dtype=np.int32)


@pytest.fixture(scope="module")
def model(fill):
    """A model with large weights, so that its choices depend on the whole window."""
    sizes = {"num_blocks": 1, "hidden_size": 8, "num_heads": 2, "tied_embeddings": False}
    build = partial(GPT, vocab_size=16, context_length=CONTEXT, dropout=0.5, **sizes)
    return fill(lambda: build(rngs=nnx.Rngs(0)), scale=1.0)


def test_greedy_takes_the_argmax_and_slides_past_the_context(model):
    got = generate(model, PROMPT, num_tokens=8, context_length=CONTEXT)
    copy = nnx.clone(model)
    copy.eval()
    run = nnx.jit(lambda model, tokens: model(tokens))
    expected = PROMPT
    for _ in range(8):
        logits = run(copy, expected[:, -CONTEXT:])[:, -1]
        expected = np.concatenate([expected, np.argmax(logits, axis=-1)[:, None]], axis=1)
    np.testing.assert_array_equal(got, expected)
    assert len(np.unique(got[:, 5:])) > 2


def test_one_seed_gives_one_text(model):
    sample = lambda seed: generate(  # noqa: E731
        model, PROMPT, num_tokens=8, context_length=CONTEXT, temperature=5.0, seed=seed
    )
    np.testing.assert_array_equal(sample(1), sample(1))
    assert (sample(1) != sample(2)).any()


def test_low_temperature_is_greedy(model):
    greedy = generate(model, PROMPT, num_tokens=8, context_length=CONTEXT)
    cold = generate(model, PROMPT, num_tokens=8, context_length=CONTEXT, temperature=1e-4)
    np.testing.assert_array_equal(cold, greedy)


def test_prompts_longer_than_the_context_keep_their_end(model):
    long = np.concatenate([np.zeros((2, 3), np.int32), PROMPT, PROMPT], axis=1)
    got = generate(model, long, num_tokens=8, context_length=CONTEXT)
    short = generate(model, long[:, -CONTEXT:], num_tokens=8, context_length=CONTEXT)
    np.testing.assert_array_equal(got[:, -8:], short[:, -8:])
    np.testing.assert_array_equal(got[:, :-8], long)


def test_the_model_sees_no_more_than_the_tokens_there_are():
    def count(tokens):
        lengths.append(tokens.shape[1])
        return jax.nn.one_hot((tokens + 1) % 16, 16)

    class Counting(nnx.Module):
        def __call__(self, tokens):
            return count(tokens)

    lengths: list[int] = []
    got = generate(Counting(), PROMPT, num_tokens=3, context_length=131_072)
    np.testing.assert_array_equal(got[:, 5:], [[6, 7, 8]] * 2)
    assert set(lengths) == {8}


def test_model_is_left_as_it_was(model):
    before = jax.tree.leaves(nnx.state(model))
    generate(model, PROMPT, num_tokens=8, context_length=CONTEXT)
    after = jax.tree.leaves(nnx.state(model))
    assert not model.vocabulary.dropout.deterministic
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_empty_prompts_are_refused(model):
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, np.zeros((2, 0), np.int32), num_tokens=2, context_length=CONTEXT)
