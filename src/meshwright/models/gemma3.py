"""Gemma3: the text decoder of Gemma 3, in which most blocks see a sliding window; and Gemma 2."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from meshwright.models.decoder import Decoder, DecoderBlock, GroupedAttention, RMSNorm, Rotary


class Gemma3Block(DecoderBlock):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). [B, T, D] → [B, T, D]."""

    def __init__(self, *, norm: Callable[[int], RMSNorm], hidden_size: int, **parts: Any) -> None:
        super().__init__(norm=norm, hidden_size=hidden_size, **parts)
        self.attention_out_norm = norm(hidden_size)
        self.mlp_out_norm = norm(hidden_size)

    def __call__(self, x: Array, positions: Array, segment_ids: Array | None) -> Array:
        """Add both halves to the residual stream x [B, T, D]."""
        mixed = self.attention(self.attention_norm(x), positions, segment_ids)
        x = x + self.attention_out_norm(mixed)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))


class Gemma3(Decoder):
    """Decoder-only language model; the default sizes are those of ``gemma3_tiny``.

    Other arguments are those of `Decoder` and `GroupedAttention`, where H·C may differ from D.

    Args:
        sliding_window: positions that a local block sees.
        global_every: every how many blocks one sees the whole row; the others are local.
        norm_epsilon: added to the mean square in norms.
        rope_base: base of the rotary frequencies of global blocks.
        rope_local_base: base of the rotary frequencies of local blocks.
        rope_factor: by how much the frequencies of global blocks are divided.
        query_scale: attention scores are divided by its square root; None means C.
        attention_softcap: bounds the attention scores; None for no bound.
        logit_softcap: bounds the logits; None for no bound.
    """

    head_norms = True
    """Whether queries and keys have norms."""

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
        attention_softcap: float | None = None,
        logit_softcap: float | None = None,
        attention_dropout: float = 0.0,
        tied_embeddings: bool = True,
        pad_token_id: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        # Scales are stored as their difference from 1.
        norm = partial(RMSNorm, epsilon=norm_epsilon, offset=1.0)
        attention = partial(
            GroupedAttention,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dropout=attention_dropout,
            norm=norm if self.head_norms else None,
            scale=query_scale,
            softcap=attention_softcap,
        )
        local = partial(attention, rotary=Rotary(rope_local_base), window=sliding_window)
        whole = partial(attention, rotary=Rotary(rope_base, factor=rope_factor))
        super().__init__(
            attention=[local if n % global_every else whole for n in range(1, num_blocks + 1)],
            mlp_size=mlp_size,
            activation=jax.nn.gelu,
            norm=norm,
            block=Gemma3Block,
            vocab_size=vocab_size,
            context_length=context_length,
            hidden_size=hidden_size,
            tied_embeddings=tied_embeddings,
            pad_token_id=pad_token_id,
            softcap=logit_softcap,
            rngs=rngs,
        )

    def embed(self, tokens: Array) -> Array:
        """Return the vectors [B, T, D] of tokens [B, T], scaled by √D."""
        x = super().embed(tokens)
        # Rounded like the embedding, as the published weights expect.
        return x * jnp.asarray(math.sqrt(x.shape[-1]), x.dtype)


class Gemma2(Gemma3):
    """The decoder of Gemma 2: scores and logits are bounded, queries and keys have no norms."""

    head_norms = False
