"""Qwen3: the dense decoder of Qwen 3, which normalizes queries and keys."""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx

from meshwright.models.decoder import Decoder, GroupedAttention, RMSNorm, Rotary


class Qwen3(Decoder):
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
        attention_dropout: rate on the attention weights.
        tied_embeddings: whether the token embedding is also the output layer.
        pad_token_id: a token whose lookup gives its row no gradient; None for no such token.
        rngs: streams ``params`` and, with a rate, ``dropout``.
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
        attention_dropout: float = 0.0,
        tied_embeddings: bool = True,
        pad_token_id: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        norm = partial(RMSNorm, epsilon=norm_epsilon)
        attention = partial(
            GroupedAttention,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dropout=attention_dropout,
            rotary=Rotary(rope_base),
            norm=norm,
        )
        super().__init__(
            attention=[attention] * num_blocks,
            mlp_size=mlp_size,
            activation=jax.nn.silu,
            norm=norm,
            vocab_size=vocab_size,
            context_length=context_length,
            hidden_size=hidden_size,
            tied_embeddings=tied_embeddings,
            pad_token_id=pad_token_id,
            rngs=rngs,
        )
