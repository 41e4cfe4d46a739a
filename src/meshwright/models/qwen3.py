"""Qwen3: the dense decoder of Qwen 3, which normalizes queries and keys."""

from functools import partial

import jax
from flax import nnx

from meshwright.models.decoder import Decoder, GroupedAttention, RMSNorm, Rotary


class Qwen3(Decoder):
    """Decoder-only language model; the default sizes are those of ``qwen3_tiny``.

    Its arguments are those of `Decoder` and `GroupedAttention`, where H·C may differ from D;
    ``norm_epsilon`` is added to the mean square in norms, and ``rope_base`` is the base of the
    rotary frequencies.
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
