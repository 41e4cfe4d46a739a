"""Decoders and losses as users write them: plain Flax and JAX, nothing from Meshwright.

`Mha` is built of nnx.MultiHeadAttention, `Hand` has its attention written out. Both are of the
size of GPT-2 by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array


class WrittenOut(nnx.Module):
    """Causal attention written out: scores, where, softmax, mixed values."""

    def __init__(self, hidden_size: int, num_heads: int, *, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.qkv = nnx.Linear(hidden_size, 3 * hidden_size, rngs=rngs)
        self.out = nnx.Linear(hidden_size, hidden_size, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Mix the positions of x [B, T, D]."""
        batch, length, width = x.shape
        parts = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (part.reshape(batch, length, self.num_heads, -1) for part in parts)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(x.dtype)
        causal = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
        return self.out(mixed.reshape(batch, length, width))


class MultiHead(nnx.Module):
    """Causal attention of nnx.MultiHeadAttention."""

    def __init__(self, hidden_size: int, num_heads: int, *, rngs: nnx.Rngs):
        self.heads = nnx.MultiHeadAttention(num_heads, hidden_size, decode=False, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Mix the positions of x [B, T, D]."""
        return self.heads(x, mask=nnx.make_causal_mask(x[..., 0]))


class Block(nnx.Module):
    """Attention and MLP with norms before them. [B, T, D] → [B, T, D]."""

    def __init__(
        self, attention: Callable[..., Any], hidden_size: int, num_heads: int, *, rngs: nnx.Rngs
    ):
        self.norm1 = nnx.LayerNorm(hidden_size, rngs=rngs)
        self.attention = attention(hidden_size, num_heads, rngs=rngs)
        self.norm2 = nnx.LayerNorm(hidden_size, rngs=rngs)
        self.up = nnx.Linear(hidden_size, 4 * hidden_size, rngs=rngs)
        self.down = nnx.Linear(4 * hidden_size, hidden_size, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Add both halves to x."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class _Decoder(nnx.Module):
    attention: Callable[..., Any]

    def __init__(
        self,
        *,
        vocab_size: int = 50304,
        context_length: int = 1024,
        num_blocks: int = 12,
        hidden_size: int = 768,
        num_heads: int = 12,
        rngs: nnx.Rngs,
    ):
        self.tokens = nnx.Embed(vocab_size, hidden_size, rngs=rngs)
        self.positions = nnx.Embed(context_length, hidden_size, rngs=rngs)
        self.blocks = nnx.List(
            [Block(self.attention, hidden_size, num_heads, rngs=rngs) for _ in range(num_blocks)]
        )
        self.norm = nnx.LayerNorm(hidden_size, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Return logits [B, T, V] for tokens [B, T]; the embedding is also the output layer."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


class Mha(_Decoder):
    """A decoder of nnx.MultiHeadAttention."""

    attention = MultiHead


class Hand(_Decoder):
    """A decoder with attention written out."""

    attention = WrittenOut


def optax_loss(model: Any, batch: Any) -> Array:
    """Return the mean of optax's cross entropy."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def hand_loss(model: Any, batch: Any) -> Array:
    """Return the mean of logsumexp minus the target's logit."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
