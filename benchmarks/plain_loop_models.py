"""Twelve models as users write them: plain Flax and JAX, nothing from Meshwright.

Each is built with the dtype it computes in. A case is a model, its loss, and the arrays of a batch.
The case nano is for trying it out on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY = 32000
Array = Any


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        build: makes the model from its dtype and random numbers.
        loss: the loss of a model and a batch.
        shapes: the shape of each array of a batch; a vocabulary makes it tokens.
    """

    build: Callable[[Any, nnx.Rngs], nnx.Module]
    loss: Callable[[Any, Any], Array]
    shapes: dict[str, tuple[int, ...]]

    def batch(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Return a batch of random numbers."""
        made: dict[str, np.ndarray] = {}
        for name, shape in self.shapes.items():
            if name in ("tokens", "source"):
                made[name] = generator.integers(0, VOCABULARY, shape, np.int32)
            elif name == "level":
                made[name] = generator.random(shape, np.float32)
            else:
                made[name] = generator.standard_normal(shape, np.float32)
        return made


def linear(inside: int, outside: int, dtype: Any, rngs: nnx.Rngs, *, bias: bool = False) -> Any:
    """A linear layer."""
    return nnx.Linear(inside, outside, use_bias=bias, dtype=dtype, rngs=rngs)


def rotate(x: Array) -> Array:
    """Rotary positions for x [B, T, H, C], pairs side by side."""
    length, width = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, width, 2) / width)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return turned.reshape(x.shape).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention with grouped heads, in several kinds.

    These are: fused, softcapped, with ALiBi's biases, with learned ones by distance, and sigmoid.
    """

    def __init__(self, width: int, heads: int, groups: int, kind: str, dtype: Any, rngs: nnx.Rngs):
        self.heads, self.groups, self.size, self.kind = heads, groups, width // heads, kind
        self.query = linear(width, width, dtype, rngs)
        self.key = linear(width, groups * self.size, dtype, rngs)
        self.value = linear(width, groups * self.size, dtype, rngs)
        self.out = linear(width, width, dtype, rngs)
        if kind == "learned":
            self.biases = nnx.Param(0.02 * jax.random.normal(rngs.params(), (32, heads)))

    def __call__(self, x: Array) -> Array:
        """Apply the layers."""
        batch, length, width = x.shape
        q = self.query(x).reshape(batch, length, self.heads, self.size)
        k = self.key(x).reshape(batch, length, self.groups, self.size)
        v = self.value(x).reshape(batch, length, self.groups, self.size)
        if self.kind not in ("alibi", "learned"):
            q, k = rotate(q), rotate(k)
        if self.kind == "fused":
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = self.written_out(q, k, v)
        return self.out(mixed.reshape(batch, length, width))

    def written_out(self, q: Array, k: Array, v: Array) -> Array:
        """Scores, softmax and mixed values."""
        batch, length = q.shape[:2]
        q = q.reshape(batch, length, self.groups, -1, self.size)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / self.size**0.5
        back = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
        if self.kind == "softcap":
            scores = 30 * jnp.tanh(scores / 30)
        elif self.kind == "sigmoid":
            weights = jnp.where(back <= 0, nnx.sigmoid(scores - jnp.log(length)), 0)
            return jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)
        elif self.kind == "learned":
            far = 16 + jnp.log(jnp.maximum(-back, 1) / 16) / jnp.log(128 / 16) * 16
            bucket = jnp.where(-back < 16, -back, jnp.clip(far.astype(jnp.int32), 16, 31))
            biases = self.biases[...][jnp.maximum(bucket, 0)]
            biases = biases.transpose(2, 0, 1).reshape(self.groups, -1, length, length)
            scores = scores + biases.astype(scores.dtype)
        else:
            slopes = 2.0 ** (-8 * jnp.arange(1, self.heads + 1) / self.heads)
            slopes = slopes.reshape(self.groups, -1)[..., None, None]
            scores = scores + (slopes * back).astype(scores.dtype)
        weights = jax.nn.softmax(jnp.where(back <= 0, scores, -1e30), -1)
        return jnp.einsum("bkgts,bskd->btkgd", weights, v)


class DecoderBlock(nnx.Module):
    """Attention and a gated MLP."""

    def __init__(self, width: int, inner: int, kind: str, dtype: Any, rngs: nnx.Rngs):
        self.attention = Attention(width, 16, 4, kind, dtype, rngs)
        self.gate = linear(width, inner, dtype, rngs)
        self.up = linear(width, inner, dtype, rngs)
        self.down = linear(inner, width, dtype, rngs)
        self.norm1 = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Apply the layers."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Chunks(nnx.Module):
    """A linear recurrence with decay, in chunks, as in Mamba 2."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs, *, heads: int = 16, keys: int = 64):
        self.heads, self.keys = heads, keys
        self.inward, self.gate = (linear(width, width, dtype, rngs) for _ in range(2))
        self.write, self.read = (linear(width, keys, dtype, rngs) for _ in range(2))
        self.rate = linear(width, heads, dtype, rngs, bias=True)
        self.out = linear(width, width, dtype, rngs)
        self.decay = nnx.Param(jnp.zeros((heads,)))
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Apply the layers."""
        batch, length, width = x.shape
        size = 64
        y = self.norm(x)

        def cut(z: Array, *dims: int) -> Array:
            return z.reshape(batch, length // size, size, *dims)

        rate = cut(nnx.softplus(self.rate(y)), self.heads).astype(jnp.float32)
        values = cut(self.inward(y), self.heads, width // self.heads)
        values = values * rate[..., None].astype(x.dtype)
        write, read = cut(self.write(y), self.keys), cut(self.read(y), self.keys)
        logs = jnp.cumsum(-jnp.exp(self.decay[...]) * rate, 2)
        between = logs[:, :, :, None] - logs[:, :, None]
        seen = jnp.tril(jnp.ones((size, size), bool))[:, :, None]
        kept = jnp.where(seen, jnp.exp(between), 0).astype(x.dtype)
        scores = jnp.einsum("bnqk,bnsk->bnqs", read, write)
        inside = jnp.einsum("bnqs,bnqsh,bnshd->bnqhd", scores, kept, values)
        to_end = jnp.exp(logs[:, :, -1:] - logs).astype(x.dtype)
        states = jnp.einsum("bnsk,bnsh,bnshd->bnhkd", write, to_end, values)

        def carry_on(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
            new, left = chunk
            return state * left[..., None, None].astype(state.dtype) + new, state

        chunks = states.swapaxes(0, 1), jnp.exp(logs[:, :, -1]).swapaxes(0, 1)
        _, before = jax.lax.scan(carry_on, jnp.zeros_like(states[:, 0]), chunks)
        from_start = jnp.exp(logs).astype(x.dtype)
        outside = jnp.einsum("bnqk,bnqh,nbhkd->bnqhd", read, from_start, before)
        return x + self.out((inside + outside).reshape(x.shape) * nnx.silu(self.gate(y)))


class Experts(nnx.Module):
    """Attention, and the best two of eight experts with a capacity."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs, *, experts: int = 8):
        self.attention = nnx.MultiHeadAttention(12, width, decode=False, dtype=dtype, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        self.up = nnx.Param(init(rngs.params(), (experts, width, 2048)))
        self.down = nnx.Param(init(rngs.params(), (experts, 2048, width)))
        self.experts = experts

    def __call__(self, x: Array) -> Array:
        """Apply the layers."""
        batch, length, _ = x.shape
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        y = self.norm2(x)
        weights, chosen = jax.lax.top_k(nnx.softmax(self.router(y.astype(jnp.float32))), 2)
        weights = weights / weights.sum(-1, keepdims=True)
        capacity = length // 4
        routed = jax.nn.one_hot(chosen, self.experts)
        slots = jnp.cumsum(routed.reshape(batch, length * 2, -1), 1).reshape(routed.shape) - 1
        routed = routed * (slots < capacity)
        slots = jax.nn.one_hot(slots, capacity)
        there = jnp.einsum("btke,btkec->btec", routed, slots).astype(y.dtype)
        back = jnp.einsum("btk,btke,btkec->btec", weights, routed, slots).astype(y.dtype)
        z = jnp.einsum("btec,btd->becd", there, y)
        z = nnx.gelu(jnp.einsum("becd,edf->becf", z, self.up[...].astype(y.dtype)))
        z = jnp.einsum("becf,efd->becd", z, self.down[...].astype(y.dtype))
        return x + jnp.einsum("btec,becd->btd", back, z)


class Recurrent(nnx.Module):
    """An LSTM over time with a residual connection."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(width, width, dtype=dtype, rngs=rngs), unroll=4)
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Apply the layers."""
        return x + self.rnn(self.norm(x)).astype(x.dtype)


class Language(nnx.Module):
    """Embeddings, blocks, a head."""

    def __init__(self, block: Callable[..., nnx.Module], blocks: int, width: int, dtype: Any,
                 rngs: nnx.Rngs):  # fmt: skip
        self.tokens = nnx.Embed(VOCABULARY, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([block(dtype=dtype, rngs=rngs) for _ in range(blocks)])
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.head = linear(width, VOCABULARY, dtype, rngs)

    def __call__(self, tokens: Array) -> Array:
        """Apply the layers."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Translator(nnx.Module):
    """An encoder and a decoder of nnx.MultiHeadAttention."""

    def __init__(self, width: int, blocks: int, dtype: Any, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, width, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed(1024, width, dtype=dtype, rngs=rngs)
        self.encoder = nnx.List([TranslatorBlock(width, False, dtype, rngs) for _ in range(blocks)])
        self.decoder = nnx.List([TranslatorBlock(width, True, dtype, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, source: Array, tokens: Array) -> Array:
        """Apply the layers."""
        memory, x = self.embed(source), self.embed(tokens)
        for block in self.encoder:
            memory = block(memory, None)
        for block in self.decoder:
            x = block(x, memory)
        return self.tokens.attend(self.norm(x))

    def embed(self, tokens: Array) -> Array:
        """Tokens and places."""
        return self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))


class TranslatorBlock(nnx.Module):
    """Attention, attention to the encoder if there is one, an MLP."""

    def __init__(self, width: int, decodes: bool, dtype: Any, rngs: nnx.Rngs):
        def heads() -> nnx.MultiHeadAttention:
            return nnx.MultiHeadAttention(8, width, decode=False, dtype=dtype, rngs=rngs)

        self.itself, self.decodes = heads(), decodes
        self.other = heads() if decodes else None
        self.up = linear(width, 4 * width, dtype, rngs, bias=True)
        self.down = linear(4 * width, width, dtype, rngs, bias=True)
        self.norms = nnx.List([nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(3)])

    def __call__(self, x: Array, memory: Array | None) -> Array:
        """Apply the layers."""
        mask = nnx.make_causal_mask(x[..., 0]) if self.decodes else None
        x = x + self.itself(self.norms[0](x), mask=mask)
        if self.other is not None:
            x = x + self.other(self.norms[1](x), memory)
        return x + self.down(nnx.relu(self.up(self.norms[2](x))))


class Diffusion(nnx.Module):
    """A diffusion transformer: patches of latents, norms modulated by the noise level."""

    def __init__(self, width: int, blocks: int, dtype: Any, rngs: nnx.Rngs):
        self.inward = linear(16, width, dtype, rngs, bias=True)
        self.level1 = linear(256, width, dtype, rngs, bias=True)
        self.level2 = linear(width, width, dtype, rngs, bias=True)
        self.places = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (256, width)))
        self.blocks = nnx.List([Modulated(width, dtype, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.out = linear(width, 16, dtype, rngs, bias=True)

    def __call__(self, patches: Array, level: Array) -> Array:
        """Apply the layers."""
        waves = level[:, None] * jnp.exp(-jnp.arange(128) * (9.2 / 128)) * 1000
        waves = jnp.concatenate([jnp.cos(waves), jnp.sin(waves)], -1)
        level = self.level2(nnx.silu(self.level1(waves)))
        x = self.inward(patches) + self.places[...].astype(level.dtype)
        for block in self.blocks:
            x = block(x, level)
        return self.out(self.norm(x))


class Modulated(nnx.Module):
    """A block of a diffusion transformer."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs, *, heads: int = 12):
        self.heads = heads
        self.modulation = linear(width, 6 * width, dtype, rngs, bias=True)
        self.qkv = linear(width, 3 * width, dtype, rngs, bias=True)
        self.out = linear(width, width, dtype, rngs, bias=True)
        self.up = linear(width, 4 * width, dtype, rngs, bias=True)
        self.down = linear(4 * width, width, dtype, rngs, bias=True)
        plain = {"use_scale": False, "use_bias": False, "dtype": dtype, "rngs": rngs}
        self.norm1, self.norm2 = nnx.LayerNorm(width, **plain), nnx.LayerNorm(width, **plain)

    def __call__(self, x: Array, level: Array) -> Array:
        """Apply the layers."""
        batch, length, width = x.shape
        parts = jnp.split(self.modulation(nnx.silu(level))[:, None], 6, -1)
        y = self.norm1(x) * (1 + parts[0]) + parts[1]
        heads = (z.reshape(batch, length, self.heads, -1) for z in jnp.split(self.qkv(y), 3, -1))
        q, k, v = heads
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / (width // self.heads) ** 0.5
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)
        x = x + parts[2] * self.out(mixed.reshape(x.shape))
        y = self.norm2(x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * self.down(nnx.gelu(self.up(y)))


class Convolutions(nnx.Module):
    """A U-Net with group norms: two levels down, two up, skip connections."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs):
        def conv(inside: int, outside: int, **options: Any) -> nnx.Conv:
            return nnx.Conv(inside, outside, (3, 3), dtype=dtype, rngs=rngs, **options)

        self.inward, self.out = conv(4, width), conv(width, 4)
        sizes = (width, 2 * width, 4 * width)
        self.down = nnx.List([Residual(a, a, dtype, rngs) for a in sizes])
        self.shrink = nnx.List([conv(a, 2 * a, strides=2) for a in sizes[:-1]])
        self.up = nnx.List([Residual(3 * a, a, dtype, rngs) for a in sizes[:-1]])

    def __call__(self, x: Array, level: Array) -> Array:
        """Apply the layers."""
        del level
        x, kept = self.inward(x), []
        for number, block in enumerate(self.down):
            x = block(x)
            if number < len(self.shrink):
                kept.append(x)
                x = self.shrink[number](x)
        for block, skip in zip(reversed(self.up), reversed(kept), strict=True):
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = block(jnp.concatenate([x, skip], -1))
        return self.out(x)


class Residual(nnx.Module):
    """Two convolutions with group norms, and a way around them."""

    def __init__(self, inside: int, outside: int, dtype: Any, rngs: nnx.Rngs):
        self.norm1 = nnx.GroupNorm(inside, num_groups=32, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.GroupNorm(outside, num_groups=32, dtype=dtype, rngs=rngs)
        self.conv1 = nnx.Conv(inside, outside, (3, 3), dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(outside, outside, (3, 3), dtype=dtype, rngs=rngs)
        self.around = linear(inside, outside, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        """Apply the layers."""
        y = self.conv1(nnx.silu(self.norm1(x)))
        return self.around(x) + self.conv2(nnx.silu(self.norm2(y)))


class Mixer(nnx.Module):
    """MLPs over patches and over features in turn, for images of 224 × 224."""

    def __init__(self, width: int, blocks: int, dtype: Any, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, width, (16, 16), strides=16, dtype=dtype, rngs=rngs)
        sizes = ((196, 256), (width, 4 * width)) * blocks
        self.ups = nnx.List([linear(a, b, dtype, rngs, bias=True) for a, b in sizes])
        self.downs = nnx.List([linear(b, a, dtype, rngs, bias=True) for a, b in sizes])
        self.norms = nnx.List([nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in sizes])
        self.head = linear(width, 1000, dtype, rngs, bias=True)

    def __call__(self, images: Array) -> Array:
        """Apply the layers."""
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for number, (up, down, norm) in enumerate(
            zip(self.ups, self.downs, self.norms, strict=True)
        ):
            y = norm(x)
            y = y.swapaxes(1, 2) if number % 2 == 0 else y
            y = down(nnx.gelu(up(y)))
            x = x + (y.swapaxes(1, 2) if number % 2 == 0 else y)
        return self.head(x.mean(1))


def next_token(model: Any, batch: Any) -> Array:
    """Cross entropy of the next token."""
    given = (batch["source"],) if "source" in batch else ()
    logits = model(*given, batch["tokens"][:, :-1]).astype(jnp.float32)
    wanted = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


def denoising(model: Any, batch: Any) -> Array:
    """Mean squared error of the noise."""
    level = batch["level"].reshape(-1, *[1] * (batch["x"].ndim - 1))
    noisy = jnp.sqrt(level) * batch["x"] + jnp.sqrt(1 - level) * batch["noise"]
    return jnp.square(model(noisy, batch["level"]).astype(jnp.float32) - batch["noise"]).mean()


def random_class(model: Any, batch: Any) -> Array:
    """Cross entropy of a class that the first pixel decides."""
    wanted = (jnp.abs(batch["x"][:, 0, 0, 0]) * 300).astype(jnp.int32) % 1000
    logits = model(batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


def decoder(block: Callable[..., nnx.Module], blocks: int, width: int) -> Callable[..., Language]:
    """Return how a language model of some blocks is built."""
    return lambda dtype, rngs: Language(block, blocks, width, dtype, rngs)


def attending(kind: str, *, blocks: int = 8) -> Callable[..., Language]:
    """Return how a decoder with a kind of attention is built."""
    return decoder(lambda **made: DecoderBlock(1024, 2816, kind, **made), blocks, 1024)


CASES: dict[str, Case] = {
    "grouped": Case(attending("fused", blocks=12), next_token, {"tokens": (4, 2049)}),
    "softcap": Case(attending("softcap"), next_token, {"tokens": (16, 1025)}),
    "alibi": Case(attending("alibi"), next_token, {"tokens": (16, 1025)}),
    "learned": Case(attending("learned"), next_token, {"tokens": (16, 1025)}),
    "sigmoid": Case(attending("sigmoid"), next_token, {"tokens": (16, 1025)}),
    "chunks": Case(
        decoder(lambda **made: Chunks(1024, **made), 12, 1024), next_token, {"tokens": (16, 1025)}
    ),
    "experts": Case(
        decoder(lambda **made: Experts(768, **made), 6, 768), next_token, {"tokens": (16, 513)}
    ),
    "lstm": Case(
        decoder(lambda **made: Recurrent(1024, **made), 2, 1024), next_token, {"tokens": (64, 257)}
    ),
    "translator": Case(
        lambda dtype, rngs: Translator(1024, 6, dtype, rngs),
        next_token,
        {"source": (32, 512), "tokens": (32, 513)},
    ),
    "diffusion": Case(
        lambda dtype, rngs: Diffusion(768, 12, dtype, rngs),
        denoising,
        {"x": (256, 256, 16), "noise": (256, 256, 16), "level": (256,)},
    ),
    "unet": Case(
        lambda dtype, rngs: Convolutions(128, dtype, rngs),
        denoising,
        {"x": (64, 64, 64, 4), "noise": (64, 64, 64, 4), "level": (64,)},
    ),
    "mixer": Case(
        lambda dtype, rngs: Mixer(768, 12, dtype, rngs), random_class, {"x": (128, 224, 224, 3)}
    ),
    "nano": Case(
        decoder(lambda **made: DecoderBlock(64, 128, "softcap", **made), 1, 64),
        next_token,
        {"tokens": (2, 65)},
    ),
}
