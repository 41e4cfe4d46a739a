"""Llama3: the decoder of Llama 3.1 and 3.2, and those that differ from it in little."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from meshwright.models.decoder import Decoder, GroupedAttention, RMSNorm, Rotary


@dataclass(frozen=True)
class Llama3Rotary(Rotary):
    """Rotary positions whose slow frequencies alone are divided by `factor`.

    Between `low_frequency` and `high_frequency` turns per `original_context` positions, the two
    are blended.
    """

    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_context: int = 8192

    def frequencies(self, head_dim: int) -> Array:
        """Return the angle from one position to the next for each pair: float32 [C/2]."""
        fast = Rotary(self.base).frequencies(head_dim)
        turns = self.original_context * fast / (2 * jnp.pi)
        keep = (turns - self.low_frequency) / (self.high_frequency - self.low_frequency)
        keep = jnp.clip(keep, 0.0, 1.0)
        return keep * fast + (1.0 - keep) * fast / self.factor


class Llama3(Decoder):
    """Decoder-only language model; the default sizes are those of ``llama3_tiny``.

    Other arguments are those of `Decoder` and `GroupedAttention`.

    Args:
        norm_epsilon: added to the mean square in norms.
        rope_base: base of the rotary frequencies.
        rope_factor: by how much slow frequencies are divided; None or 1 for not at all.
        rope_low_frequency: turns per original context below which a frequency is slow.
        rope_high_frequency: turns per original context above which it is kept.
        rope_original_context: longest row before the context was extended.
        sliding_window: positions that a token sees, its own included; None for all.
    """

    qkv_bias = False
    """Whether the layers of queries, keys and values have biases."""

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
        norm_epsilon: float = 1e-5,
        rope_base: float = 500_000.0,
        rope_factor: float | None = 8.0,
        rope_low_frequency: float = 1.0,
        rope_high_frequency: float = 4.0,
        rope_original_context: int = 32,
        sliding_window: int | None = None,
        attention_dropout: float = 0.0,
        tied_embeddings: bool = True,
        pad_token_id: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        rotary = Llama3Rotary(
            base=rope_base,
            factor=rope_factor or 1.0,
            low_frequency=rope_low_frequency,
            high_frequency=rope_high_frequency,
            original_context=rope_original_context,
        )
        attention = partial(
            GroupedAttention,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dropout=attention_dropout,
            rotary=rotary,
            window=sliding_window,
            bias=self.qkv_bias,
        )
        super().__init__(
            attention=[attention] * num_blocks,
            mlp_size=mlp_size,
            activation=jax.nn.silu,
            norm=partial(RMSNorm, epsilon=norm_epsilon),
            vocab_size=vocab_size,
            context_length=context_length,
            hidden_size=hidden_size,
            tied_embeddings=tied_embeddings,
            pad_token_id=pad_token_id,
            rngs=rngs,
        )


class Mistral(Llama3):
    """The decoder of Mistral, which may have a sliding window."""


class Phi3(Llama3):
    """The decoder of Phi 3 and Phi 4, which may have a sliding window."""


class Qwen2(Llama3):
    """The decoder of Qwen 2 and 2.5: queries, keys and values have biases."""

    qkv_bias = True
