"""MoEGPT: a GPT with a mixture of experts in each block, written with einsum."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from meshwright.models.attention import INIT_STD
from meshwright.models.gpt import Attention, LanguageModel


class Experts(nnx.Module):
    """Σₑ gₑ(x)·Wₑ·gelu(Uₑ·x) with gates g = softmax(router(x)). [B, T, D] → [B, T, D].

    Dispatch is dense: every expert gets every token, so no token is dropped and there is no
    capacity to choose.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        expert_size: int,
        out_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        init = nnx.initializers.normal(INIT_STD)
        out_init = nnx.initializers.normal(out_std)
        up_shape = (num_experts, hidden_size, expert_size)
        down_shape = (num_experts, expert_size, hidden_size)
        self.router = nnx.Linear(
            hidden_size, num_experts, use_bias=False, kernel_init=init, rngs=rngs
        )
        self.up = nnx.Param(init(rngs.params(), up_shape, jnp.float32))
        self.down = nnx.Param(out_init(rngs.params(), down_shape, jnp.float32))

    def gates(self, x: Array) -> Array:
        """Return the weight of each expert for each token: [B, T, E], with sum 1 over E."""
        scores = self.router(x)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        return jax.nn.softmax(scores, axis=-1).astype(x.dtype)

    def __call__(self, x: Array) -> Array:
        """Mix the experts' outputs for each position of x [B, T, D]."""
        inside = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        gated = inside * self.gates(x)[..., None]
        return jnp.einsum("btef,efd->btd", gated, self.down[...])


class MoEBlock(nnx.Module):
    """x + attention(norm(x)), then x + experts(norm(x)). [B, T, D] → [B, T, D].

    `experts` are the other arguments of `Experts`.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        dropout: float,
        out_std: float,
        rngs: nnx.Rngs,
        **experts: Any,
    ) -> None:
        shared: Any = {"hidden_size": hidden_size, "out_std": out_std, "rngs": rngs}
        self.attention_norm = nnx.LayerNorm(hidden_size, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(
            num_heads=num_heads, num_kv_heads=num_heads, qkv="separate", **shared
        )
        self.experts_norm = nnx.LayerNorm(hidden_size, epsilon=1e-5, rngs=rngs)
        self.experts = Experts(**experts, **shared)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        """Add both halves to the residual stream x [B, T, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.experts(self.experts_norm(x)))


class MoEGPT(LanguageModel):
    """Decoder-only language model with a mixture of experts in every block.

    Other arguments are those of `GPT`; the rate of dropout is also that of the embedded tokens.

    Args:
        num_experts: E, experts in each block.
        expert_size: F, width inside one expert.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1024,
        context_length: int = 128,
        num_blocks: int = 2,
        hidden_size: int = 128,
        num_heads: int = 4,
        num_experts: int = 4,
        expert_size: int = 256,
        dropout: float = 0.1,
        rngs: nnx.Rngs,
    ) -> None:
        block = partial(
            MoEBlock, num_heads=num_heads, num_experts=num_experts, expert_size=expert_size
        )
        super().__init__(
            block=block,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            context_length=context_length,
            hidden_size=hidden_size,
            dropout=dropout,
            tied_embeddings=True,
            rngs=rngs,
        )
