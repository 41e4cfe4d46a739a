"""Decoders as users write them, each mixing positions in another way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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


class Biased(Attention):
    """With a learned bias for each distance."""

    def __init__(self, rngs):
        super().__init__(self.by_distance, rngs)
        self.biases = nnx.Param(jax.random.normal(rngs.params(), (HEADS, 9), jnp.float64))

    def by_distance(self, scores, tokens):
        places = _places(scores.shape[-1])
        back = jnp.clip(places[:, None] - places, 0, 8)
        return _softmax(scores + self.biases[...][:, back], _seen(len(places)))


class Twice(nnx.Module):
    """Two layers: the second needs all rows of the first."""

    def __init__(self, mix, rngs):
        self.first, self.second = mix(rngs), mix(rngs)

    def __call__(self, x, tokens):
        return self.second(x + self.first(x, tokens), tokens)


class Layer(nnx.Module):
    """A layer of Flax, and how it is called."""

    def __init__(self, layer, call):
        self.layer, self.call = layer, call

    def __call__(self, x, tokens):
        return self.call(self.layer, x)


class Translator(nnx.Module):
    """An encoder that sees all of its source, and a decoder that reads what it made."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, **WIDE, rngs=rngs)
        self.encoder = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **WIDE, rngs=rngs)
        self.own = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **WIDE, rngs=rngs)
        self.across = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **WIDE, rngs=rngs)

    def __call__(self, source, tokens):
        real = source != 0
        x = self.tokens(source)
        x = x + self.encoder(x, mask=nnx.make_attention_mask(real, real))
        y = self.tokens(tokens)
        y = y + self.own(y, mask=nnx.make_causal_mask(tokens))
        y = y + self.across(y, x, mask=nnx.make_attention_mask(tokens >= 0, real))
        return self.tokens.attend(y)


def _places(length):
    # As they are without 64-bit numbers.
    return jnp.arange(length, dtype=jnp.int32)


def _seen(length, *, ahead=0, back=None):
    rows, keys = _places(length)[:, None], _places(length)[None]
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
    back = _places(length)[None] - _places(length)[:, None]
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


class Compressed(nnx.Module):
    """Keys and values from a few compressed numbers, with a key for rotation that heads share."""

    def __init__(self, rngs):
        self.query = nnx.Linear(WIDTH, HEADS * 12, **WIDE, rngs=rngs)
        self.down = nnx.Linear(WIDTH, 6 + 4, **WIDE, rngs=rngs)
        self.norm = nnx.RMSNorm(6, **WIDE, rngs=rngs)
        self.up = nnx.Linear(6, HEADS * 16, **WIDE, rngs=rngs)
        self.out = nnx.Linear(HEADS * 8, WIDTH, **WIDE, rngs=rngs)

    def __call__(self, x, tokens):
        batch, length, _ = x.shape
        query = self.query(x).reshape(batch, length, HEADS, 12)
        small, turned = jnp.split(self.down(x), [6], -1)
        key, value = jnp.split(self.up(self.norm(small)).reshape(batch, length, HEADS, 16), 2, -1)
        turned = jnp.broadcast_to(_rotated(turned[:, :, None]), (batch, length, HEADS, 4))
        query = jnp.concatenate([query[..., :8], _rotated(query[..., 8:])], -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.concatenate([key, turned], -1))
        weights = _softmax(scores, _seen(length))
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, -1))


def _rotated(x):
    angles = jnp.arange(x.shape[1])[:, None] / 10.0 ** jnp.arange(x.shape[-1] // 2)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    one, other = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], -1)


class Rotary(nnx.Module):
    """Attention with tables of angles in an attribute."""

    def __init__(self, rngs):
        angles = np.arange(128)[:, None] / 10.0 ** np.arange(WIDTH // 2)
        self.cos, self.sin = nnx.Variable(jnp.cos(angles)), nnx.Variable(jnp.sin(angles))
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, **WIDE, rngs=rngs)

    def __call__(self, x, tokens):
        length = x.shape[1]
        cos, sin = self.cos[...][:length], self.sin[...][:length]

        def rotate(x):
            one, other = x[..., ::2], x[..., 1::2]
            pair = one * cos - other * sin, one * sin + other * cos
            return jnp.stack(pair, -1).reshape(x.shape)

        query, key, value = jnp.split(self.qkv(x), 3, -1)
        scores = jnp.einsum("bqd,bkd->bqk", rotate(query), rotate(key))
        return jnp.einsum("bqk,bkd->bqd", _softmax(scores, _seen(length)), value)


class Parallel(nnx.Module):
    """Attention and an MLP of the same input."""

    def __init__(self, rngs):
        self.attention = Attention(lambda s, t: _softmax(s, _seen(s.shape[-1])), rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, **WIDE, rngs=rngs)

    def __call__(self, x, tokens):
        return self.attention(x, tokens) + jax.nn.silu(self.up(x))


class Chunks(nnx.Module):
    """A state-space layer in chunks, as in Mamba 2: quadratic inside of one, a state between."""

    def __init__(self, rngs, size, *, pads, wrong=""):
        self.size, self.pads, self.wrong = size, pads, wrong
        self.inputs = nnx.Linear(WIDTH, 2 * WIDTH + HEADS, **WIDE, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), padding="CAUSAL", **WIDE, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, **WIDE, rngs=rngs)

    def __call__(self, x, tokens):
        batch, length, _ = x.shape
        if self.pads:
            x = jnp.pad(x, ((0, 0), (0, -length % self.size), (0, 0)))
        x, both, steps = jnp.split(self.inputs(x), [WIDTH, 2 * WIDTH], -1)
        x = jax.nn.silu(self.conv(x))

        def divided(value, *dims):
            return value.reshape(batch, -1, self.size, *dims)

        x, (read, write) = divided(x, HEADS, WIDTH // HEADS), jnp.split(divided(both, WIDTH), 2, -1)
        decay = jnp.cumsum(-jax.nn.softplus(divided(steps, HEADS)), axis=2)
        between = decay[:, :, :, None] - decay[:, :, None]
        seen = _seen(self.size, ahead=int(self.wrong == "mask"))
        inside = jnp.exp(jnp.where(seen[..., None], between, -jnp.inf))
        y = jnp.einsum("bnld,bnsd,bnlsh,bnshp->bnlhp", read, write, inside, x)
        left = jnp.exp(decay[:, :, -1:] - decay)
        states = jnp.einsum("bnsd,bnsh,bnshp->nbhpd", write, left, x)

        def pass_on(state, chunk):
            new, kept = chunk
            after = state * kept[..., None, None] + new
            return after, after if self.wrong == "state" else state

        whole = jnp.moveaxis(jnp.exp(decay[:, :, -1]), 1, 0)
        _, before = jax.lax.scan(pass_on, jnp.zeros_like(states[0]), (states, whole))
        reached = left if self.wrong == "decay" else jnp.exp(decay)
        y += jnp.einsum("bnld,nbhpd,bnlh->bnlhp", read, before, reached)
        return self.out(y.reshape(batch, -1, WIDTH)[:, :length])


CACHED = {
    "written_out": _masked(),
    "window": _masked(back=4),
    "softcap": _attention(lambda s, t: _softmax(3 * jnp.tanh(s / 3), _seen(s.shape[-1]))),
    "alibi": _attention(_alibi),
    "learned_bias": Biased,
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
    "compressed": Compressed,
    "rotary_table": Rotary,
    "parallel": Parallel,
    "chunks": lambda rngs: Chunks(rngs, 4, pads=False),
    "padded_chunks": lambda rngs: Chunks(rngs, 4, pads=True),
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
    **{
        f"chunks_{wrong}": (lambda rngs, w=wrong: Chunks(rngs, 4, pads=True, wrong=w), AHEAD)
        for wrong in ("mask", "state", "decay")
    },
    "sorted": (_of(lambda layer, x: layer(jnp.sort(x, axis=1))), AHEAD),
}
"""Ways to mix positions that depend on later ones, or on how many there are."""
