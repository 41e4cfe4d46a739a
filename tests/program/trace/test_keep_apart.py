"""Documents packed into rows: gradients are those of rows of their own, in models of any make."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.errors import UserError
from meshwright.program.evaluate.widen import wide_evaluator
from meshwright.program.kernels.find_kernels import KernelSearch, find_kernels
from meshwright.program.trace.build_model import describe_model
from meshwright.program.trace.traced_loss import trace_loss
from meshwright.sharding.decide import dim_classes
from meshwright.tasks.language_modeling import LanguageModeling

VOCAB, WIDTH, LENGTH = 11, 8, 10


class Library(nnx.Module):
    """A decoder of the library's attention, with learned positions."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        return self.head(nnx.relu(x))


class Written(nnx.Module):
    """A decoder whose attention is written out."""

    def __init__(self, rngs, kind="rotary"):
        self.kind = kind
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.qkv = nnx.List([nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.bias = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, LENGTH)))

    def attend(self, x, qkv, tokens):
        length = x.shape[1]
        q, k, v = (y.reshape(*x.shape[:2], 2, -1) for y in jnp.split(qkv(x), 3, axis=-1))
        if self.kind == "rotary":
            angles = jnp.arange(length)[:, None] * jnp.array([1.0, 0.1])
            q, k = turn(q, angles), turn(k, angles)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        mask = jnp.tril(jnp.ones((length, length), bool))
        if self.kind == "bias":
            scores = scores + self.bias[:length, :length]
        if self.kind == "padded":
            mask = mask & (tokens != 0)[:, None, None, :]
        if self.kind == "window":
            mask = mask & ~jnp.tril(mask, -3)
        if self.kind == "linear":
            return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(mask, scores, 0), v).reshape(x.shape)
        if self.kind == "padded":
            scores = 5 * jnp.tanh(scores / 5)
        scores = jnp.where(mask, scores, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for qkv in self.qkv:
            x = x + jax.checkpoint(lambda x, qkv=qkv: self.attend(x, qkv, tokens))(x)
        return self.head(x)


class Stacked(Written):
    """The same blocks, in a loop."""

    def __call__(self, tokens):
        kernels = jnp.stack([qkv.kernel[...] for qkv in self.qkv])

        def step(x, kernel):
            return x + self.attend(x, lambda y: y @ kernel, tokens), None

        return self.head(jax.lax.scan(step, self.embed(tokens), kernels)[0])


class Recurrent(nnx.Module):
    """A model that reads one token after the other."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.cell = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.cell(self.embed(tokens)))


class Mixed(nnx.Module):
    """A model that mixes positions in some other way."""

    def __init__(self, rngs, mix):
        self.embed, self.mix = nnx.Embed(VOCAB, WIDTH, rngs=rngs), mix
        self.conv = nnx.Conv(WIDTH, WIDTH, 3, padding="CAUSAL", rngs=rngs)

    def __call__(self, tokens):
        return self.mix(self, self.embed(tokens)) @ self.embed.embedding[...].T


def turn(x, angles):
    """Rotate halves of heads [B, T, H, D] by angles [T, D / 2]."""
    one, other = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


def stacked(rows):
    """Return rows of any length as arrays, filled up with 0."""
    fill = {key: np.zeros((len(rows), LENGTH + 1), np.float32) for key in rows[0]}
    for number, row in enumerate(rows):
        for key, values in row.items():
            fill[key][number, : len(values)] = values
    return fill


def batches():
    """Return documents packed into rows, and the same with a row each."""
    random = np.random.default_rng(0)
    lengths = [[4, 3, 3], [6, 5], [11]]
    rows, alone = [], []
    for row in lengths:
        made = {"tokens": [], "segment_ids": [], "positions": [], "mask": []}
        for number, length in enumerate(row, start=1):
            tokens = random.integers(1, VOCAB, length).tolist()
            learned = (random.random(length) < 0.7).astype(np.float32)
            learned[0] = 0
            own = {"tokens": tokens, "segment_ids": [number] * length}
            own |= {"positions": list(range(length)), "mask": learned.tolist()}
            for key, values in own.items():
                made[key] += values
            alone.append(own)
        rows.append(made)
    packed, single = stacked(rows), stacked(alone)
    for batch in (packed, single):
        batch |= {key: batch[key].astype(np.int32) for key in batch if key != "mask"}
        batch["mask"] = batch["mask"][:, 1:]
        batch["positions"] = np.minimum(batch["positions"], LENGTH - 1)
    return packed, {key: single[key] for key in ("tokens", "mask")}


def gradients(build, batch, *, wide):
    """Return the program and the gradients of the mean loss over all tokens that are learned."""
    leaves = describe_model(build)
    traced = trace_loss(
        LanguageModeling(vocab_size=VOCAB, context_length=LENGTH).loss, leaves, batch
    )
    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        values = [
            np.asarray(v, dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v
            for v in leaves.values(build(nnx.Rngs(0)))
        ]
        weights = [n for n, leaf in enumerate(leaves.leaves) if leaf.is_weight]

        def mean(own):
            all_values = dict(enumerate(values)) | dict(zip(weights, own, strict=True))
            run = wide_evaluator().run if wide else jax.extend.core.jaxpr_as_fun(traced.closed)
            args = [*all_values.values(), *jax.tree.leaves(batch)]
            out = run(traced.closed, args) if wide else run(*args)
            return out[0] / out[1]

        return traced, jax.jit(jax.value_and_grad(mean))([jnp.asarray(values[n]) for n in weights])


KINDS = ("rotary", "bias", "padded", "window", "linear")
MODELS = {
    "library": Library,
    **{kind: lambda rngs, kind=kind: Written(rngs, kind) for kind in KINDS},
    "stacked": Stacked,
}


EVERY_DAY = {"rotary": True}


@pytest.mark.parametrize(
    ("name", "wide"),
    [
        pytest.param(name, wide, marks=[] if EVERY_DAY.get(name) is wide else pytest.mark.full)
        for name in MODELS
        for wide in (False, True)
    ],
)
def test_packed_gradients_are_those_of_rows_of_their_own(name, wide):
    packed, alone = batches()
    _, (loss, found) = gradients(MODELS[name], packed, wide=wide)
    _, (loss_alone, expected) = gradients(MODELS[name], alone, wide=wide)
    tolerance = 1e-12 if wide else 1e-6
    np.testing.assert_allclose(loss, loss_alone, rtol=tolerance)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("build", "operation"),
    [
        (Recurrent, "`scan` in `cell`"),
        (lambda rngs: Mixed(rngs, lambda own, x: own.conv(x)), "in `conv`"),
        (lambda rngs: Mixed(rngs, lambda own, x: jnp.cumsum(x, axis=1)), "`cumsum`"),
        (
            lambda rngs: Mixed(rngs, lambda own, x: x + x.mean(axis=1, keepdims=True)),
            "`reduce_sum`",
        ),
        (lambda rngs: Mixed(rngs, lambda own, x: jnp.roll(x, 1, axis=1)), "`slice`"),
        (lambda rngs: Mixed(rngs, lambda own, x: x[:, ::-1]), "`rev`"),
    ],
)
def test_other_ways_to_mix_tokens_are_refused_with_their_operation_and_module(build, operation):
    with pytest.raises(UserError, match=operation):
        trace_loss(LanguageModeling(vocab_size=VOCAB).loss, describe_model(build), batches()[0])


def test_a_kernel_still_replaces_the_attention_with_documents():
    loss = LanguageModeling(vocab_size=VOCAB).loss
    for build in (Library, lambda rngs: Written(rngs, "plain")):
        traced = trace_loss(loss, describe_model(build), batches()[0], jnp.bfloat16)
        search = KernelSearch("portable", "cpu")
        found = find_kernels(traced, dim_classes(traced), lambda program, variable: None, search)
        uses = {use.detail for use in found.uses if use.kind == "attention"}
        assert uses == {"causal, packed documents"}
