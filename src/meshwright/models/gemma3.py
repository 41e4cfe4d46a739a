"""Gemma3: the text decoder of Gemma 3, in which most blocks see a sliding window."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from meshwright.models.attention import residual_std
from meshwright.models.decoder import (
    GatedMLP,
    GroupedAttention,
    RMSNorm,
    Rotary,
    embedding,
    linear,
    row_positions,
)


class Gemma3Block(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). [B, T, D] → [B, T, D].

    Args:
        attention: makes the attention.
        mlp: makes the MLP.
        norm: makes a norm from its size.
        hidden_size: D.
        rngs: stream ``params``.
    """

    def __init__(
        self,
        *,
        attention: Callable[..., GroupedAttention],
        mlp: Callable[..., GatedMLP],
        norm: Callable[[int], RMSNorm],
        hidden_size: int,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_norm = norm(hidden_size)
        self.attention = attention(hidden_size=hidden_size, rngs=rngs)
        self.attention_out_norm = norm(hidden_size)
        self.mlp_norm = norm(hidden_size)
        self.mlp = mlp(hidden_size=hidden_size, rngs=rngs)
        self.mlp_out_norm = norm(hidden_size)

    def __call__(self, x: Array, positions: Array, segment_ids: Array | None) -> Array:
        """Add both halves to the residual stream x [B, T, D]."""
        mixed = self.attention(self.attention_norm(x), positions, segment_ids)
        x = x + self.attention_out_norm(mixed)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))


class Gemma3(nnx.Module):
    """Decoder-only language model; the default sizes are those of ``gemma3_tiny``.

    Args:
        vocab_size: V, tokens in the vocabulary.
        context_length: the longest row of tokens.
        num_blocks: transformer blocks.
        hidden_size: D, width of the residual stream.
        num_heads: H, query heads.
        num_kv_heads: K, key/value heads, each for H / K query heads.
        head_dim: C, dims of a head; H·C may differ from D.
        mlp_size: F, dims inside the MLP.
        sliding_window: positions that a local block sees.
        global_every: every how many blocks one sees the whole row; the others are local.
        norm_epsilon: added to the mean square in norms.
        rope_base: base of the rotary frequencies of global blocks.
        rope_local_base: base of the rotary frequencies of local blocks.
        rope_factor: by how much the frequencies of global blocks are divided.
        query_scale: attention scores are divided by its square root; None means C.
        tied_embeddings: whether the token embedding is also the output layer.
        rngs: stream ``params``.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1024,
        context_length: int = 128,
        num_blocks: int = 4,
        hidden_size: int = 256,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        mlp_size: int = 768,
        sliding_window: int = 16,
        global_every: int = 2,
        norm_epsilon: float = 1e-6,
        rope_base: float = 1_000_000.0,
        rope_local_base: float = 10_000.0,
        rope_factor: float = 1.0,
        query_scale: float | None = None,
        tied_embeddings: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        self.context_length = context_length
        # Scales are stored as their difference from 1.
        norm = partial(RMSNorm, epsilon=norm_epsilon, offset=1.0)
        out_std = residual_std(num_blocks)
        attention = partial(
            GroupedAttention,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm=norm,
            scale=query_scale,
            out_std=out_std,
        )
        local = partial(attention, rotary=Rotary(rope_local_base), window=sliding_window)
        whole = partial(attention, rotary=Rotary(rope_base, factor=rope_factor))
        kinds = [local if n % global_every else whole for n in range(1, num_blocks + 1)]
        mlp = partial(GatedMLP, mlp_size=mlp_size, activation=jax.nn.gelu, out_std=out_std)
        block = partial(Gemma3Block, mlp=mlp, norm=norm, hidden_size=hidden_size)
        self.tokens = embedding(vocab_size, hidden_size, rngs=rngs)
        self.blocks = nnx.List([block(attention=kind, rngs=rngs) for kind in kinds])
        self.norm = norm(hidden_size)
        self.head = None if tied_embeddings else linear(hidden_size, vocab_size, rngs=rngs)

    def __call__(
        self, tokens: Array, *, segment_ids: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Return next-token logits [B, T, V] for tokens [B, T], T at most `context_length`.

        `segment_ids` [B, T] keep documents packed into one row from attending to each other, and
        `positions` [B, T] let each start at 0.
        """
        positions = row_positions(tokens, positions, self.context_length)
        x = self.tokens(tokens)
        # Rounded like the embedding, as the published weights expect.
        x = x * jnp.asarray(math.sqrt(x.shape[-1]), x.dtype)
        for block in self.blocks:
            x = block(x, positions, segment_ids)
        x = self.norm(x)
        return self.tokens.attend(x) if self.head is None else self.head(x)
