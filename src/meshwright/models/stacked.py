"""StackedGPT: a GPT whose blocks are stacked along a leading dim and run in a scan."""

from __future__ import annotations

from functools import partial

from flax import nnx
from jax import Array

from meshwright.models.attention import causal_mask, residual_std
from meshwright.models.gpt import QKV, Block, Vocabulary


class StackedGPT(nnx.Module):
    """The model of `meshwright.models.gpt.GPT`, compiled once for all blocks.

    Every variable below ``blocks`` has the block as its leading dim; the arguments are GPT's.
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
        tied_embeddings: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        self.vocabulary = Vocabulary(
            vocab_size=vocab_size,
            context_length=context_length,
            hidden_size=hidden_size,
            dropout=dropout,
            tied_embeddings=tied_embeddings,
            rngs=rngs,
        )
        block = partial(
            Block,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            qkv=qkv,
            dropout=dropout,
            out_std=residual_std(num_blocks),
        )

        @nnx.split_rngs(splits=num_blocks)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return block(rngs=rngs)

        self.blocks = make_blocks(rngs)

    def __call__(
        self, tokens: Array, *, segment_ids: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Return next-token logits [B, T, V] for tokens [B, T], as `GPT` does."""
        mask = causal_mask(tokens.shape[1], segment_ids)

        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        def run(x: Array, block: Block, mask: Array) -> Array:
            return block(x, mask)

        x = run(self.vocabulary.encode(tokens, positions), self.blocks, mask)
        return self.vocabulary.decode(x)
