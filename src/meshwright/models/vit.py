"""ViT: a transformer that classifies an image as a sequence of patches."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array


def patchify(image: Array, patch_size: int) -> Array:
    """Cut images [B, H, W, C] into p × p patches, row by row: [B, H/p·W/p, p·p·C]."""
    batch, height, width, channels = image.shape
    rows, columns = height // patch_size, width // patch_size
    x = image.reshape(batch, rows, patch_size, columns, patch_size, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * columns, patch_size * patch_size * channels)


class EncoderBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where every patch attends to all others.

    [B, N, D] → [B, N, D].
    """

    def __init__(self, *, hidden_size: int, num_heads: int, dropout: float, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(hidden_size, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads, hidden_size, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(hidden_size, rngs=rngs)
        self.up = nnx.Linear(hidden_size, 4 * hidden_size, rngs=rngs)
        self.down = nnx.Linear(4 * hidden_size, hidden_size, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Add both halves to x [B, N, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y = self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))
        return x + self.dropout(y)


class ViT(nnx.Module):
    """Patches, learned positions, transformer encoder, mean over patches, linear head.

    Args:
        image_size: height and width of the images, divisible by `patch_size`.
        patch_size: height and width of a patch.
        channels_in: channels of the images.
        num_blocks: transformer blocks.
        hidden_size: D, width of the residual stream.
        num_heads: attention heads.
        num_classes: outputs.
        dropout: rate on both branches of every block.
        rngs: streams ``params`` and ``dropout``.
    """

    def __init__(
        self,
        *,
        image_size: int = 28,
        patch_size: int = 7,
        channels_in: int = 1,
        num_blocks: int = 2,
        hidden_size: int = 64,
        num_heads: int = 4,
        num_classes: int = 10,
        dropout: float = 0.1,
        rngs: nnx.Rngs,
    ) -> None:
        if image_size % patch_size:
            raise ValueError(f"image_size={image_size} does not divide by patch_size={patch_size}.")
        self.patch_size = patch_size
        num_patches = (image_size // patch_size) ** 2
        self.embed = nnx.Linear(patch_size * patch_size * channels_in, hidden_size, rngs=rngs)
        positions = nnx.initializers.normal(0.02)(rngs.params(), (num_patches, hidden_size))
        self.positions = nnx.Param(positions)
        self.blocks = nnx.List(
            [
                EncoderBlock(
                    hidden_size=hidden_size, num_heads=num_heads, dropout=dropout, rngs=rngs
                )
                for _ in range(num_blocks)
            ]
        )
        self.norm = nnx.LayerNorm(hidden_size, rngs=rngs)
        self.head = nnx.Linear(hidden_size, num_classes, rngs=rngs)

    def __call__(self, image: Array) -> Array:
        """Return class logits [B, num_classes] for images [B, H, W, channels_in]."""
        x = self.embed(patchify(image, self.patch_size)) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))
