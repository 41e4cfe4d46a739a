"""Decoders as users write them, each mixing positions in another way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY, WIDTH, HEADS = 32, 16, 2
AHEAD = "sees later tokens"
WIDE = {"dtype": jnp.float64, "param_dtype": jnp.float64}


class Decoder(nnx.Module):
    """Embeddings, one way to mix positions, an MLP, tied logits; computes in float64."""

    def __init__(self, mix, *, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, **WIDE, rngs=rngs)
        self.places = nnx.Embed(256, WIDTH, **WIDE, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, **WIDE, rngs=rngs)
        self.mix = mix(rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **WIDE, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **WIDE, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        x = x + self.mix(self.norm(x), tokens)
        return self.tokens.attend(x + self.down(nnx.gelu(self.up(x))))


class Attention(nnx.Module):
    """Attention written out, with a function from scores and tokens to weights."""

    def __init__(self, weigh, rngs):
        self.weigh = weigh
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, **WIDE, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, **WIDE, rngs=rngs)

    def __call__(self, x, tokens):
        batch, length, _ = x.shape
        q, k, v = (part.reshape(batch, length, HEADS, -1) for part in jnp.split(self.qkv(x), 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        mixed = jnp.einsum("bhqk,bkhd->bqhd", self.weigh(scores, tokens), v)
        return self.out(mixed.reshape(x.shape))


class Layer(nnx.Module):
    """A layer of Flax, and how it is called."""

    def __init__(self, layer, call):
        self.layer, self.call = layer, call

    def __call__(self, x, tokens):
        return self.call(self.layer, x)


def _seen(length, *, ahead=0, back=None):
    rows, keys = jnp.arange(length)[:, None], jnp.arange(length)[None]
    seen = keys <= rows + ahead
    return seen if back is None else seen & (keys > rows - back)


def _softmax(scores, seen):
    return jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)


def _attention(weigh):
    return lambda rngs: Attention(weigh, rngs)


def _masked(**options):
    return _attention(lambda s, t: _softmax(s, _seen(s.shape[-1], **options)))


def _without_padding(scores, tokens):
    length = scores.shape[-1]
    real = (tokens != 3)[:, None, None, :]
    return _softmax(scores, _seen(length) & real | jnp.eye(length, dtype=bool))


def _alibi(scores, tokens):
    length = scores.shape[-1]
    back = jnp.arange(length)[None] - jnp.arange(length)[:, None]
    return _softmax(scores + jnp.array([0.5, 0.25])[:, None, None] * back, _seen(length))


def _layer(make, call=lambda layer, x: layer(x)):
    return lambda rngs: Layer(make(rngs), call)


def _recurrent(cell):
    return _layer(lambda rngs: nnx.RNN(cell(WIDTH, WIDTH, **WIDE, rngs=rngs)))


def _flax_attention(rngs):
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **WIDE, rngs=rngs)


def _conv(padding):
    return _layer(lambda rngs: nnx.Conv(WIDTH, WIDTH, (3,), padding=padding, **WIDE, rngs=rngs))


def _of(function):
    return lambda rngs: Layer(nnx.Linear(WIDTH, WIDTH, **WIDE, rngs=rngs), function)


def _blocks(rngs):
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Linear(WIDTH, WIDTH, **WIDE, rngs=rngs)

    return nnx.split_rngs(splits=3)(make)(rngs)


def _over_blocks(blocks, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, block):
        scores = jnp.einsum("bqd,bkd->bqk", block(x), x)
        return x + jnp.einsum("bqk,bkd->bqd", _softmax(scores, _seen(x.shape[1])), x)

    return run(x, blocks)


CACHED = {
    "written_out": _masked(),
    "window": _masked(back=4),
    "softcap": _attention(lambda s, t: _softmax(3 * jnp.tanh(s / 3), _seen(s.shape[-1]))),
    "alibi": _attention(_alibi),
    "added_mask": _attention(
        lambda s, t: jax.nn.softmax(s + jnp.where(_seen(s.shape[-1]), 0.0, -1e9), -1)
    ),
    "sigmoid": _attention(lambda s, t: jnp.where(_seen(s.shape[-1]), jax.nn.sigmoid(s), 0.0)),
    "without_padding": _attention(_without_padding),
    "flax": _layer(
        _flax_attention, lambda layer, x: layer(x, mask=nnx.make_causal_mask(x[..., 0]))
    ),
    "lstm": _recurrent(nnx.LSTMCell),
    "gru": _recurrent(nnx.GRUCell),
    "convolution": _conv("CAUSAL"),
    "running_mean": _of(
        lambda layer, x: layer(jnp.cumsum(x, 1) / (1 + jnp.arange(x.shape[1]))[:, None])
    ),
    "shift": _of(lambda layer, x: layer(jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1])),
    "loop_over_blocks": _layer(_blocks, _over_blocks),
}
"""Ways to mix positions that need a cache, or a state."""

RECOMPUTED = {
    "no_mask": (_attention(lambda s, t: jax.nn.softmax(s, -1)), AHEAD),
    "one_ahead": (_masked(ahead=1), AHEAD),
    "convolution_ahead": (_conv("SAME"), AHEAD),
    "shift_ahead": (
        _of(lambda layer, x: layer(jnp.pad(x, ((0, 0), (0, 1), (0, 0)))[:, 1:])),
        AHEAD,
    ),
    "reversed_sum": (
        _of(lambda layer, x: jnp.cumsum(layer(x)[:, ::-1], 1)[:, ::-1]),
        AHEAD,
    ),
    "mean": (_of(lambda layer, x: x - layer(x).sum(1, keepdims=True) / 100), AHEAD),
    "norm_over_time": (
        _of(lambda layer, x: x / jnp.max(layer(x), 1, keepdims=True)),
        AHEAD,
    ),
    "length": (
        _attention(lambda s, t: _softmax(s * jnp.log(s.shape[-1]), _seen(s.shape[-1]))),
        "how many tokens",
    ),
    "fourier": (_of(lambda layer, x: jnp.fft.fft(layer(x), axis=1).real), ""),
    "sorted": (_of(lambda layer, x: layer(jnp.sort(x, axis=1))), AHEAD),
}
"""Ways to mix positions that depend on later ones, or on how many there are."""
