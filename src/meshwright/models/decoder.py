"""What decoders with rotary positions share: norm, rotary, grouped-query attention, gated MLP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from meshwright.models.attention import INIT_STD, attend, causal_mask, residual_std, row_positions
from meshwright.models.model_sizes import check_sizes

embedding = partial(nnx.Embed, embedding_init=nnx.initializers.normal(INIT_STD))
"""A table of vectors by token, with its initial values."""


def linear(
    size: int, out_size: int, *, std: float = INIT_STD, bias: bool = False, rngs: nnx.Rngs
) -> nnx.Linear:
    """Return a layer, without bias unless it is to have one."""
    init = nnx.initializers.normal(std)
    return nnx.Linear(size, out_size, use_bias=bias, kernel_init=init, rngs=rngs)


class RMSNorm(nnx.Module):
    """x / √(mean(x²) + ε) · (offset + scale), over the last dim, computed in float32.

    Initially, offset + scale is 1.
    """

    def __init__(self, size: int, *, epsilon: float, offset: float = 0.0) -> None:
        self.epsilon = epsilon
        self.offset = offset
        self.scale = nnx.Param(jnp.full((size,), 1.0 - offset, jnp.float32))

    def __call__(self, x: Array) -> Array:
        """Normalize x [..., size]; the result has its dtype."""
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = y / jnp.sqrt(jnp.square(y).mean(axis=-1, keepdims=True) + self.epsilon)
        return (y * (self.offset + self.scale[...])).astype(x.dtype)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: pairs of dims (i, i + C/2) are rotated by position · frequency.

    Attributes:
        base: the frequencies are base^(-2i/C).
        factor: by how much they are divided, for rows longer than those of pretraining.
    """

    base: float
    factor: float = 1.0

    def frequencies(self, head_dim: int) -> Array:
        """Return the angle from one position to the next for each pair: float32 [C/2]."""
        check_sizes(head_dim=head_dim)
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        return 1.0 / self.base**exponents / self.factor

    def __call__(self, x: Array, positions: Array) -> Array:
        """Rotate x [B, T, H, C] by its positions [T] or [B, T]; the angles are in float32."""
        frequencies = self.frequencies(x.shape[-1])
        angles = positions[..., None, None].astype(frequencies.dtype) * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, axis=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class GroupedAttention(nnx.Module):
    """Causal self-attention with rotary positions. [B, T, D] → [B, T, D].

    Args:
        hidden_size: D.
        num_heads: H, query heads.
        num_kv_heads: K, key/value heads, each for H / K query heads.
        head_dim: C.
        rotary: rotates queries and keys.
        norm: makes the norms of queries and keys from their size; None for no norms.
        window: the number of positions a query sees, its own included; None for all.
        scale: scores are divided by its square root; None means C.
        softcap: bounds the scores; None for no bound.
        bias: whether the layers of queries, keys and values have biases.
        dropout: rate on the attention weights.
        out_std: initial standard deviation of the output layer.
        rngs: streams ``params`` and, with a rate, ``dropout``.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary,
        norm: Callable[[int], RMSNorm] | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        out_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        check_sizes(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.head_dim = head_dim
        self.rotary = rotary
        self.window = window
        self.scale = scale
        self.softcap = softcap
        self.query = linear(hidden_size, num_heads * head_dim, bias=bias, rngs=rngs)
        self.key = linear(hidden_size, num_kv_heads * head_dim, bias=bias, rngs=rngs)
        self.value = linear(hidden_size, num_kv_heads * head_dim, bias=bias, rngs=rngs)
        self.out = linear(num_heads * head_dim, hidden_size, std=out_std, rngs=rngs)
        self.query_norm = norm(head_dim) if norm else None
        self.key_norm = norm(head_dim) if norm else None
        # Without a rate, models have no state of random streams.
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: Array, positions: Array, segment_ids: Array | None) -> Array:
        """Mix the positions of x [B, T, D], within documents if `segment_ids` are given."""
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, self.head_dim)
            for layer in (self.query, self.key, self.value)
        )
        if self.query_norm and self.key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        # The mask is made here, from sizes alone, so that a window is part of the block's program.
        mask = causal_mask(x.shape[1], segment_ids, window=self.window)
        heads = query, key, value, mask
        mixed = attend(*heads, scale=self.scale, softcap=self.softcap, dropout=self.dropout)
        return self.out(mixed.reshape(*x.shape[:2], -1))


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) · up(x)) with F dims inside. [B, T, D] → [B, T, D]."""

    def __init__(
        self,
        *,
        hidden_size: int,
        mlp_size: int,
        activation: Callable[[Array], Array],
        out_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.activation = activation
        self.gate = linear(hidden_size, mlp_size, rngs=rngs)
        self.up = linear(hidden_size, mlp_size, rngs=rngs)
        self.down = linear(mlp_size, hidden_size, std=out_std, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Transform each position of x [B, T, D] independently."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class DecoderBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), as in Llama and Qwen. [B, T, D] → [B, T, D].

    It makes its parts from D; a norm from its size.
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
        self.mlp_norm = norm(hidden_size)
        self.mlp = mlp(hidden_size=hidden_size, rngs=rngs)

    def __call__(self, x: Array, positions: Array, segment_ids: Array | None) -> Array:
        """Add both halves to the residual stream x [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), positions, segment_ids)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """A decoder-only language model: embedding, blocks, norm, output layer.

    Args:
        attention: makes the attention of each block, in their order.
        mlp_size: F, dims inside the MLP.
        activation: the activation function of the MLP.
        norm: makes a norm from its size.
        block: makes a block from its parts.
        vocab_size: V, tokens in the vocabulary.
        context_length: the longest row of tokens.
        hidden_size: D, width of the residual stream.
        tied_embeddings: whether the token embedding is also the output layer.
        pad_token_id: a token whose lookup gives its row no gradient; None for no such token.
        softcap: bounds the logits to ± this; None for no bound.
        rngs: stream ``params``.
    """

    def __init__(
        self,
        *,
        attention: Sequence[Callable[..., GroupedAttention]],
        mlp_size: int,
        activation: Callable[[Array], Array],
        norm: Callable[[int], RMSNorm],
        block: Callable[..., DecoderBlock] = DecoderBlock,
        vocab_size: int,
        context_length: int,
        hidden_size: int,
        tied_embeddings: bool,
        pad_token_id: int | None,
        softcap: float | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        out_std = residual_std(len(attention))
        mlp = partial(GatedMLP, mlp_size=mlp_size, activation=activation, out_std=out_std)
        block = partial(block, mlp=mlp, norm=norm, hidden_size=hidden_size, rngs=rngs)
        self.context_length = context_length
        self.pad_token_id = pad_token_id
        self.softcap = softcap
        self.tokens = embedding(vocab_size, hidden_size, rngs=rngs)
        self.blocks = nnx.List([block(attention=partial(a, out_std=out_std)) for a in attention])
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
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, segment_ids)
        x = self.norm(x)
        logits = self.tokens.attend(x) if self.head is None else self.head(x)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def embed(self, tokens: Array) -> Array:
        """Return the vectors [B, T, D] of tokens [B, T]."""
        x = self.tokens(tokens)
        if self.pad_token_id is None:
            return x
        return jnp.where((tokens == self.pad_token_id)[..., None], lax.stop_gradient(x), x)
