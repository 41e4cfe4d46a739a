"""Small models without a word about sharding, and their traced losses."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright.program.dims.classes import DimClasses, LeafLabel, find_dim_classes
from meshwright.program.trace.scopes import module_scopes

BATCH, LENGTH, HIDDEN, HEADS, WIDE, WORDS = 4, 8, 64, 4, 256, 256
F64 = {"param_dtype": jnp.float64}


def linear(inputs, outputs, rngs):
    return nnx.Linear(inputs, outputs, rngs=rngs, **F64)


def attend(query, key, value, **_):
    """Causal attention in the operands' own precision; groups of query heads share key heads."""
    batch, length, heads, size = query.shape
    query = query.reshape(batch, length, key.shape[2], heads // key.shape[2], size)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key) / size**0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), value)
    return mixed.reshape(batch, length, heads, size)


class Attention(nnx.Module):
    """Separate projections; fewer key heads than query heads if asked."""

    def __init__(self, rngs, hidden=HIDDEN, heads=HEADS, key_heads=None):
        self.heads, self.key_heads, self.size = heads, key_heads or heads, hidden // heads
        self.q = linear(hidden, hidden, rngs)
        self.k = linear(hidden, self.key_heads * self.size, rngs)
        self.v = linear(hidden, self.key_heads * self.size, rngs)
        self.out = linear(hidden, hidden, rngs)

    def project(self, x):
        split = lambda y, n: y.reshape(*x.shape[:2], n, self.size)  # noqa: E731
        keys = [split(w(x), self.key_heads) for w in (self.k, self.v)]
        return split(self.q(x), self.heads), *keys

    def __call__(self, x):
        return self.out(attend(*self.project(x)).reshape(x.shape))


class FusedAttention(Attention):
    """One kernel for query, key and value, flat or with its factors as dims."""

    def __init__(self, rngs, general=False):
        super().__init__(rngs)
        del self.q, self.k, self.v
        if general:
            shape = (3, self.heads, self.size)
            self.qkv = nnx.LinearGeneral(HIDDEN, shape, rngs=rngs, **F64)
        else:
            self.qkv = linear(HIDDEN, 3 * HIDDEN, rngs)

    def project(self, x):
        y = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, self.size)
        return y[:, :, 0], y[:, :, 1], y[:, :, 2]


def rotate(x):
    """Rotary positions on (batch, length, heads, size), by halves."""
    low, high = jnp.split(x, 2, -1)
    angle = jnp.arange(x.shape[1])[:, None] / 100.0 ** jnp.linspace(0, 1, low.shape[-1])
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


class Rotary(Attention):
    """Grouped queries, normalised and rotated, as recent language models have them."""

    def __init__(self, rngs):
        super().__init__(rngs, heads=8, key_heads=4)
        self.norm = nnx.RMSNorm(self.size, rngs=rngs, **F64)

    def project(self, x):
        query, key, value = super().project(x)
        return rotate(self.norm(query)), rotate(self.norm(key)), value


class Gated(nnx.Module):
    """A gated feed-forward layer, gate and values in one kernel or two."""

    def __init__(self, rngs, fused):
        self.up = linear(HIDDEN, (1 + fused) * WIDE, rngs)
        self.gate = None if fused else linear(HIDDEN, WIDE, rngs)
        self.down = linear(WIDE, HIDDEN, rngs)

    def __call__(self, x):
        if self.gate is None:
            value, gate = jnp.split(self.up(x), 2, -1)
        else:
            value, gate = self.up(x), self.gate(x)
        return self.down(value * jax.nn.silu(gate))


class Modern(nnx.Module):
    """Rotary attention and a gated layer between a tied embedding."""

    def __init__(self, rngs, fused=False):
        self.embed = nnx.Embed(WORDS, HIDDEN, rngs=rngs, **F64)
        self.attn, self.mlp = Rotary(rngs), Gated(rngs, fused)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attn(x)
        return self.embed.attend(x + self.mlp(x))


class Library(nnx.Module):
    """Flax's own attention: kernels of (hidden, heads, size)."""

    def __init__(self, rngs, heads=HEADS, hidden=HIDDEN):
        self.attend = nnx.MultiHeadAttention(
            heads, hidden, decode=False, attention_fn=attend, rngs=rngs, **F64
        )

    def __call__(self, x):
        return self.attend(x)


class Block(nnx.Module):
    def __init__(self, rngs, attention=Attention, hidden=HIDDEN, wide=WIDE):
        self.norm = nnx.LayerNorm(hidden, rngs=rngs, **F64)
        self.attn = attention(rngs)
        self.up = linear(hidden, wide, rngs)
        self.down = linear(wide, hidden, rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Language(nnx.Module):
    """Embedding, blocks, and a head of its own or tied to the embedding."""

    def __init__(self, rngs, blocks=1, tied=True, words=WORDS, hidden=HIDDEN, **block):
        self.embed = nnx.Embed(words, hidden, rngs=rngs, **F64)
        self.blocks = nnx.List([Block(rngs, hidden=hidden, **block) for _ in range(blocks)])
        self.head = None if tied else linear(hidden, words, rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else self.embed.attend(x)


class Stacked(nnx.Module):
    """The blocks as one stack, run by a scan."""

    def __init__(self, rngs, blocks=3):
        self.embed = nnx.Embed(WORDS, HIDDEN, rngs=rngs, **F64)
        make = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=blocks)(make)(rngs)

    def __call__(self, tokens):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(run(self.embed(tokens), self.blocks))


class Perceptron(nnx.Module):
    def __init__(self, rngs, sizes=(784, 512, 512, 256, 10)):
        pairs = pairwise(sizes)
        self.layers = nnx.List([linear(a, b, rngs) for a, b in pairs])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class Residual(nnx.Module):
    """Layers of one width, each with its residual: one class for all dims but the ends'."""

    def __init__(self, rngs, ends=(30, 10)):
        self.first = linear(ends[0], 64, rngs)
        self.layers = nnx.List([linear(64, 64, rngs) for _ in range(2)])
        self.last = linear(64, ends[1], rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.last(x)


class Convolutional(nnx.Module):
    def __init__(self, rngs, channels=(3, 32, 64, 64)):
        pairs = pairwise(channels)
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), rngs=rngs, **F64) for a, b in pairs])
        self.norms = nnx.List([nnx.BatchNorm(c, rngs=rngs, **F64) for c in channels[1:]])
        self.head = linear(channels[-1], 10, rngs)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.relu(norm(conv(x)))
        return self.head(x.mean((1, 2)))


class Recurrent(nnx.Module):
    def __init__(self, rngs, cell=nnx.LSTMCell, words=WORDS):
        self.embed = nnx.Embed(words, HIDDEN, rngs=rngs, **F64)
        self.rnn = nnx.RNN(cell(HIDDEN, 2 * HIDDEN, rngs=rngs, **F64))
        self.head = linear(2 * HIDDEN, words, rngs)

    def __call__(self, tokens):
        return self.head(self.rnn(self.embed(tokens)))


class Experts(nnx.Module):
    """Each token visits its two best experts, at most ``room`` tokens an expert and sequence."""

    def __init__(self, rngs, experts=8, room=4):
        self.experts, self.room = experts, room
        self.embed = nnx.Embed(WORDS, HIDDEN, rngs=rngs, **F64)
        self.gate = linear(HIDDEN, experts, rngs)
        normal = nnx.initializers.lecun_normal(batch_axis=0)
        self.up = nnx.Param(normal(rngs.params(), (experts, HIDDEN, WIDE), jnp.float64))
        self.down = nnx.Param(normal(rngs.params(), (experts, WIDE, HIDDEN), jnp.float64))

    def __call__(self, tokens):
        x = self.embed(tokens)
        weights, best = jax.lax.top_k(jax.nn.softmax(self.gate(x)), 2)
        chosen = jax.nn.one_hot(best, self.experts, dtype=x.dtype)
        weight = (chosen * weights[..., None]).sum(-2)
        chosen = chosen.sum(-2)
        place = (jnp.cumsum(chosen, 1) * chosen - 1).astype(jnp.int32)
        send = jax.nn.one_hot(place, self.room, dtype=x.dtype) * chosen[..., None]
        y = jnp.einsum("btec,btd->becd", send, x)
        y = jax.nn.relu(jnp.einsum("becd,edf->becf", y, self.up[...]))
        y = jnp.einsum("becf,efd->becd", y, self.down[...])
        return self.embed.attend(x + jnp.einsum("btec,becd->btd", send * weight[..., None], y))


class Shared(nnx.Module):
    """One block used twice, and two outputs."""

    def __init__(self, rngs):
        self.enter = linear(12, HIDDEN, rngs)
        self.block = Block(rngs)
        self.first, self.second = linear(HIDDEN, 5, rngs), linear(HIDDEN, 7, rngs)

    def __call__(self, x):
        x = self.block(self.block(self.enter(x)))
        return self.first(x), self.second(x)


def gpt(rngs):
    return Language(rngs, blocks=2, tied=False)


def library(rngs):
    return Language(rngs, attention=Library)


def grouped(rngs):
    return Language(rngs, attention=lambda r: Attention(r, heads=8, key_heads=2))


def general(rngs):
    return Language(rngs, attention=lambda r: FusedAttention(r, general=True))


def word_loss(model, tokens):
    logits = jax.nn.log_softmax(model(tokens)[:, :-1])
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def square_loss(model, x):
    return sum((out**2).mean() for out in jax.tree.leaves(model(x)))


def tokens(words=WORDS, length=LENGTH):
    return np.random.default_rng(0).integers(0, words, (BATCH, length)).astype(np.int32)


def numbers(*shape):
    return np.random.default_rng(0).normal(size=(BATCH, *shape))


@dataclass
class Traced:
    """A model's loss over flat leaves and its dim classes."""

    loss: Any
    leaves: list[Any]
    trained: int
    classes: DimClasses

    def step(self, leaves, batch):
        """One step of gradient descent on the parameters."""
        params, rest = leaves[: self.trained], leaves[self.trained :]
        value, grads = jax.value_and_grad(lambda ps: self.loss(*ps, *rest, batch))(params)
        return value, [p - 0.1 * g for p, g in zip(params, grads, strict=True)]


def fill(leaf, draw):
    """Numbers for a leaf: initializers would compile one program per shape."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    return (0.1 * draw.normal(size=leaf.shape)).astype(leaf.dtype)


def trace(make, loss, batch):
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, params, state = nnx.split(model, nnx.Param, ...)
    shapes, tree = jax.tree.flatten((params, state))
    draw = np.random.default_rng(1)
    leaves = [fill(leaf, draw) for leaf in shapes]
    labels = [LeafLabel("param", path) for path in paths(params)]
    labels += [LeafLabel("state", path) for path in paths(state)]

    def flat_loss(*args):
        merged = nnx.merge(graph, *jax.tree.unflatten(tree, args[:-1]), copy=True)
        with module_scopes(merged):
            return loss(merged, args[-1])

    program = jax.make_jaxpr(flat_loss)(*leaves, batch)
    classes = find_dim_classes(program, [*labels, LeafLabel("batch", "batch")])
    return Traced(flat_loss, leaves, len(jax.tree.leaves(params)), classes)


def paths(state):
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
