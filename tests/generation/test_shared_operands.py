"""Decoding reads each weight and each key once: products are joined, repeated keys are not kept."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import fill

import meshwright as mw
from meshwright.generation.make_decoder import make_decoder
from meshwright.generation.shared_operands import share_operands
from meshwright.generation.token_decoder import split_model

VOCABULARY, WIDTH, HEADS, GROUPS, LENGTH, PROMPT = 32, 16, 4, 2, 24, 12


class Grouped(nnx.Module):
    """A decoder with grouped heads, as users write it: keys are repeated for each head."""

    def __init__(self, *, dtype=jnp.float32, order="bqhd,bkhd->bhqk", rngs):
        def linear(size):
            return nnx.Linear(WIDTH, size, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.order = order
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, param_dtype=dtype, rngs=rngs)
        self.query, self.out = linear(WIDTH), linear(WIDTH)
        self.key, self.value = linear(WIDTH // GROUPS), linear(WIDTH // GROUPS)

    def attend(self, x):
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, WIDTH // HEADS)
            for layer in (self.query, self.key, self.value)
        )
        key, value = jnp.repeat(key, GROUPS, axis=2), jnp.repeat(value, GROUPS, axis=2)
        keys_first = self.order.startswith("bk")
        scores = jnp.einsum(self.order, *((key, query) if keys_first else (query, key)))
        scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e30)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return self.out(mixed.reshape(x.shape))

    def __call__(self, tokens):
        x = self.tokens(tokens)
        x = x + self.attend(x)
        return self.tokens.attend(x + self.attend(x))


@pytest.mark.parametrize(
    ("order", "kernel"),
    [("bqhd,bkhd->bhqk", "xla"), pytest.param("bkhd,bqhd->bhqk", "", marks=pytest.mark.full)],
)
def test_repeated_keys_are_kept_and_read_once(order, kernel):
    with jax.enable_x64(True):
        split = split_model(fill(lambda: Grouped(dtype=jnp.float64, order=order, rngs=nnx.Rngs(0))))
        decoder = make_decoder(split, LENGTH, kernel=kernel)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH)).astype(np.int32)
        whole = np.asarray(jax.jit(split.logits_of)(split.weights, tokens))
        weights, lengths = decoder.prepare(split.weights), np.array([12, 7], np.int32)
        logits, cache = jax.jit(decoder.start)(weights, tokens[:, :PROMPT], lengths)
        np.testing.assert_allclose(logits, whole[range(2), lengths - 1], rtol=1e-12, atol=1e-13)
        shapes = {array.shape for array in cache["rows"]}
        assert shapes == {(2, 1, HEADS // GROUPS, LENGTH, WIDTH // HEADS)}
        step = jax.jit(decoder.step)
        # One product for queries, keys and values of each attention, two in it, one after it.
        given = weights, cache, tokens[range(2), lengths], lengths
        assert step.lower(*given).as_text().count("dot_general") == 2 * 4 + 1
        logits, _ = step(*given)
        np.testing.assert_allclose(logits, whole[range(2), lengths], rtol=1e-12, atol=1e-13)


def test_norms_multiply_with_their_weights_last():
    graphdef, state = nnx.split(nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(state)
    scale = np.linspace(0.5, 2, WIDTH, dtype=np.float32)
    x = np.random.default_rng(0).normal(size=(1, 5, WIDTH)).astype(np.float32)

    def norm(scale, x):
        return nnx.merge(graphdef, jax.tree.unflatten(tree, [scale]))(x)

    assert len(leaves) == 1
    found = share_operands(jax.make_jaxpr(norm)(scale, x), 1)
    last = [eqn for eqn in found.jaxpr.eqns if eqn.primitive.name == "mul"][-1]
    assert any(v.aval.shape == (1, 1, WIDTH) for v in last.invars)
    (got,) = jax.core.eval_jaxpr(found.jaxpr, found.consts, scale, x)
    np.testing.assert_allclose(got, norm(scale, x), rtol=1e-6)


def test_what_is_computed_has_the_format_that_was_asked_for():
    split = split_model(Grouped(rngs=nnx.Rngs(0)), jnp.dtype("bfloat16"))
    split = replace(split, weights=[w.astype(jnp.bfloat16) for w in split.weights])
    decoder = make_decoder(split, LENGTH)
    prompts = np.zeros((1, 8), np.int32), np.ones(1, np.int32)
    logits, cache = jax.eval_shape(decoder.start, decoder.prepare(split.weights), *prompts)
    assert {array.dtype for array in cache["rows"]} == {jnp.dtype("bfloat16")}
    assert logits.dtype == jnp.float32


@pytest.mark.full
def test_a_model_that_changes_between_calls_is_seen():
    model, prompts = Grouped(rngs=nnx.Rngs(0)), [[1, 2, 3]]

    def generate():
        return mw.generate(model, prompts, max_new_tokens=4, context_length=16).tokens

    first = generate()
    assert generate() == first
    model.out.kernel[...] = 5 * model.out.kernel[...]
    model.tokens.embedding[...] = -model.tokens.embedding[...][::-1]
    other = generate()
    assert other != first
    model.attend = lambda x: 0 * x
    assert generate() != other
