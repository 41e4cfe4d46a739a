"""GPT: a decoder-only transformer like GPT-2."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
from flax import nnx
from jax import Array

from meshwright.models.attention import INIT_STD, attend, causal_mask, residual_std, row_positions
from meshwright.models.model_sizes import check_sizes

QKV = Literal["separate", "fused"]
"""Three layers for queries, keys and values, or one with a kernel [D, 3, heads, head_dim]."""

_init = nnx.initializers.normal(INIT_STD)


class Attention(nnx.Module):
    """Self-attention: project to heads, attend, project back. [B, T, D] → [B, T, D]."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        qkv: QKV,
        attention_dropout: float = 0.0,
        out_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        check_sizes(
            hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, qkv=qkv
        )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.fused = qkv == "fused"
        if self.fused:
            heads = (3, num_heads, self.head_dim)
            self.qkv = nnx.LinearGeneral(hidden_size, heads, kernel_init=_init, rngs=rngs)
        else:
            kv_size = num_kv_heads * self.head_dim
            linear = partial(nnx.Linear, hidden_size, kernel_init=_init, rngs=rngs)
            self.query = linear(hidden_size)
            self.key = linear(kv_size)
            self.value = linear(kv_size)
        out_init = nnx.initializers.normal(out_std)
        self.out = nnx.Linear(hidden_size, hidden_size, kernel_init=out_init, rngs=rngs)
        self.dropout = nnx.Dropout(attention_dropout) if attention_dropout else None

    def __call__(self, x: Array, mask: Array, rngs: nnx.RngStream | None = None) -> Array:
        """Mix the positions of x [B, T, D] as `mask` (bool [1 or B, T, T]) allows.

        `rngs` draws which attention weights are dropped.
        """
        dropout = None if self.dropout is None else partial(self.dropout, rngs=rngs)
        return self.out(attend(*self.project(x), mask, dropout=dropout).reshape(x.shape))

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """Return queries [B, T, H, C], keys and values [B, T, K, C]."""
        if self.fused:
            qkv = self.qkv(x)
            return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        queries = (*x.shape[:2], self.num_heads, self.head_dim)
        pairs = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        return (
            self.query(x).reshape(queries),
            self.key(x).reshape(pairs),
            self.value(x).reshape(pairs),
        )


class FeedForward(nnx.Module):
    """W₂·gelu(W₁·x) with a hidden layer of size 4·D. [B, T, D] → [B, T, D]."""

    def __init__(self, *, hidden_size: int, out_std: float, rngs: nnx.Rngs) -> None:
        out_init = nnx.initializers.normal(out_std)
        self.up = nnx.Linear(hidden_size, 4 * hidden_size, kernel_init=_init, rngs=rngs)
        self.down = nnx.Linear(4 * hidden_size, hidden_size, kernel_init=out_init, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Transform each position of x [B, T, D] independently."""
        return self.down(jax.nn.gelu(self.up(x)))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). [B, T, D] → [B, T, D].

    `heads` are the other arguments of `Attention`.
    """

    def __init__(
        self, *, hidden_size: int, dropout: float, out_std: float, rngs: nnx.Rngs, **heads: Any
    ) -> None:
        shared: Any = {"hidden_size": hidden_size, "out_std": out_std, "rngs": rngs}
        self.attention_norm = nnx.LayerNorm(hidden_size, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(**heads, **shared)
        self.mlp_norm = nnx.LayerNorm(hidden_size, epsilon=1e-5, rngs=rngs)
        self.mlp = FeedForward(**shared)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        """Add both halves to the residual stream x [B, T, D]."""
        # The weights of attention are dropped by the same random stream as its result.
        mixed = self.attention(self.attention_norm(x), mask, self.dropout.rngs)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Vocabulary(nnx.Module):
    """Embedding and output layer of a language model: tokens to vectors, vectors to logits."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        hidden_size: int,
        dropout: float,
        tied_embeddings: bool,
        rngs: nnx.Rngs,
    ) -> None:
        self.context_length = context_length
        embed = partial(nnx.Embed, features=hidden_size, embedding_init=_init, rngs=rngs)
        self.tokens = embed(vocab_size)
        self.positions = embed(context_length)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden_size, epsilon=1e-5, rngs=rngs)
        linear = partial(nnx.Linear, use_bias=False, kernel_init=_init, rngs=rngs)
        self.head = None if tied_embeddings else linear(hidden_size, vocab_size)

    def encode(self, tokens: Array, positions: Array | None = None) -> Array:
        """Embed tokens [B, T] and their positions [B, T], by default 0 to T - 1: [B, T, D]."""
        positions = row_positions(tokens, positions, self.context_length)
        return self.dropout(self.tokens(tokens) + self.positions(positions))

    def decode(self, x: Array) -> Array:
        """Score every token of the vocabulary: [B, T, D] → logits [B, T, V]."""
        x = self.norm(x)
        return self.tokens.attend(x) if self.head is None else self.head(x)


class LanguageModel(nnx.Module):
    """Vocabulary and transformer blocks: what GPT, which describes the arguments, shares."""

    def __init__(
        self,
        *,
        block: Callable[..., nnx.Module],
        num_blocks: int,
        hidden_size: int,
        dropout: float,
        embedding_dropout: float | None = None,
        rngs: nnx.Rngs,
        **vocabulary: Any,
    ) -> None:
        rate = dropout if embedding_dropout is None else embedding_dropout
        self.vocabulary = Vocabulary(hidden_size=hidden_size, dropout=rate, rngs=rngs, **vocabulary)
        out_std = residual_std(num_blocks)
        block = partial(block, hidden_size=hidden_size, dropout=dropout, out_std=out_std)
        self.blocks = self.make_blocks(block, num_blocks, rngs)

    def __call__(
        self, tokens: Array, *, segment_ids: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Return next-token logits [B, T, V] for tokens [B, T], T at most `context_length`.

        `segment_ids` [B, T] keep documents packed into one row from attending to each other, and
        `positions` [B, T] let each start at 0.
        """
        mask = causal_mask(tokens.shape[1], segment_ids)
        x = self.run_blocks(self.vocabulary.encode(tokens, positions), mask)
        return self.vocabulary.decode(x)

    def make_blocks(self, block: Callable[..., nnx.Module], num_blocks: int, rngs: nnx.Rngs) -> Any:
        """Return the blocks."""
        return nnx.List([block(rngs=rngs) for _ in range(num_blocks)])

    def run_blocks(self, x: Array, mask: Array) -> Array:
        """Pass the residual stream x [B, T, D] through all blocks."""
        for block in self.blocks:
            x = block(x, mask)
        return x


class GPT(LanguageModel):
    """Decoder-only language model; the default sizes are those of ``gpt2_tiny``.

    Args:
        vocab_size: V, tokens in the vocabulary.
        context_length: the longest row of tokens; positions are learned.
        num_blocks: transformer blocks.
        hidden_size: D, width of the residual stream.
        num_heads: H, query heads of D / H dims each.
        num_kv_heads: K, key/value heads; fewer than H is grouped-query attention, None means H.
        qkv: whether queries, keys and values have separate kernels or share one.
        dropout: rate on both branches of every block.
        embedding_dropout: rate on the embedded tokens; None for the same.
        attention_dropout: rate on the attention weights.
        tied_embeddings: whether the token embedding is also the output layer.
        rngs: streams ``params`` and ``dropout``.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1024,
        context_length: int = 128,
        num_blocks: int = 4,
        hidden_size: int = 256,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        qkv: QKV = "separate",
        dropout: float = 0.1,
        embedding_dropout: float | None = None,
        attention_dropout: float = 0.0,
        tied_embeddings: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        block = partial(
            Block,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            qkv=qkv,
            attention_dropout=attention_dropout,
        )
        super().__init__(
            block=block,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            context_length=context_length,
            hidden_size=hidden_size,
            dropout=dropout,
            embedding_dropout=embedding_dropout,
            tied_embeddings=tied_embeddings,
            rngs=rngs,
        )
