"""Qwen3: the dense decoder of Qwen 3, which normalizes queries and keys."""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jax import Array

from meshwright.models.attention import residual_std
from meshwright.models.decoder import (
    DecoderBlock,
    GatedMLP,
    GroupedAttention,
    RMSNorm,
    Rotary,
    embedding,
    linear,
    row_positions,
)


class Qwen3(nnx.Module):
    """Decoder-only language model; the default sizes are those of ``qwen3_tiny``.

    Args:
        vocab_size: V, tokens in the vocabulary.
        context_length: the longest row of tokens.
        num_blocks: transformer blocks.
        hidden_size: D, width of the residual stream.
        num_heads: H, query heads.
        num_kv_heads: K, key/value heads, each for H / K query heads.
        head_dim: C, dims of a head; H·C may differ from D.
        mlp_size: F, dims inside the MLP.
        norm_epsilon: added to the mean square in norms.
        rope_base: base of the rotary frequencies.
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
        num_heads: int = 8,
        num_kv_heads: int = 4,
        head_dim: int = 64,
        mlp_size: int = 768,
        norm_epsilon: float = 1e-6,
        rope_base: float = 1_000_000.0,
        tied_embeddings: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        self.context_length = context_length
        norm = partial(RMSNorm, epsilon=norm_epsilon)
        out_std = residual_std(num_blocks)
        attention = partial(
            GroupedAttention,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary=Rotary(rope_base),
            norm=norm,
            out_std=out_std,
        )
        mlp = partial(GatedMLP, mlp_size=mlp_size, activation=jax.nn.silu, out_std=out_std)
        block = partial(
            DecoderBlock, attention=attention, mlp=mlp, norm=norm, hidden_size=hidden_size
        )
        self.tokens = embedding(vocab_size, hidden_size, rngs=rngs)
        self.blocks = nnx.List([block(rngs=rngs) for _ in range(num_blocks)])
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
        for block in self.blocks:
            x = block(x, positions, segment_ids)
        x = self.norm(x)
        return self.tokens.attend(x) if self.head is None else self.head(x)
