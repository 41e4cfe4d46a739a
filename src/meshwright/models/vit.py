"""ViT: a transformer that classifies an image as a sequence of patches."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from meshwright.models.model_sizes import check_sizes


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

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        mlp_size: int,
        norm_epsilon: float,
        exact_gelu: bool,
        dropout: float,
        attention_dropout: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_norm = nnx.LayerNorm(hidden_size, epsilon=norm_epsilon, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads,
            hidden_size,
            dropout_rate=attention_dropout,
            broadcast_dropout=False,
            deterministic=False,
            decode=False,
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(hidden_size, epsilon=norm_epsilon, rngs=rngs)
        self.up = nnx.Linear(hidden_size, mlp_size, rngs=rngs)
        self.down = nnx.Linear(mlp_size, hidden_size, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.exact_gelu = exact_gelu

    def __call__(self, x: Array) -> Array:
        """Add both halves to x [B, N, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y = jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=not self.exact_gelu)
        return x + self.dropout(self.down(y))


class ViT(nnx.Module):
    """Patches, learned positions, transformer encoder, linear head.

    The head reads the mean over patches or, in the published form, a class token that attends to
    them. Images are as high as wide, and `patch_size` divides that.

    Args:
        hidden_size: D, width of the residual stream.
        mlp_size: hidden width of the MLP in a block; None for 4·D.
        class_token: put a learned token before the patches, and classify by it.
        norm_epsilon: added to the variance by every norm.
        exact_gelu: use the exact GELU instead of its tanh approximation.
        dropout: rate on both branches of every block.
        embedding_dropout: rate on the embedded patches.
        attention_dropout: rate on the attention weights.
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
        mlp_size: int | None = None,
        num_classes: int = 10,
        class_token: bool = False,
        norm_epsilon: float = 1e-6,
        exact_gelu: bool = False,
        dropout: float = 0.1,
        embedding_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        check_sizes(image_size=image_size, patch_size=patch_size)
        self.patch_size = patch_size
        length = (image_size // patch_size) ** 2 + class_token
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Linear(patch_size * patch_size * channels_in, hidden_size, rngs=rngs)
        self.positions = nnx.Param(normal(rngs.params(), (length, hidden_size)))
        token = normal(rngs.params(), (1, hidden_size)) if class_token else None
        self.class_token = None if token is None else nnx.Param(token)
        self.blocks = nnx.List(
            [
                EncoderBlock(
                    hidden_size=hidden_size,
                    num_heads=num_heads,
                    mlp_size=4 * hidden_size if mlp_size is None else mlp_size,
                    norm_epsilon=norm_epsilon,
                    exact_gelu=exact_gelu,
                    dropout=dropout,
                    attention_dropout=attention_dropout,
                    rngs=rngs,
                )
                for _ in range(num_blocks)
            ]
        )
        self.norm = nnx.LayerNorm(hidden_size, epsilon=norm_epsilon, rngs=rngs)
        self.head = nnx.Linear(hidden_size, num_classes, rngs=rngs)
        # Without a rate, the model has no state of a random stream for it.
        rate = embedding_dropout
        self.embedding_dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, image: Array) -> Array:
        """Return class logits [B, num_classes] for images [B, H, W, channels_in]."""
        x = self.embed(patchify(image, self.patch_size))
        if self.class_token is not None:
            token = jnp.broadcast_to(self.class_token[...], (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([token, x], axis=1)
        x = x + self.positions[...]
        if self.embedding_dropout is not None:
            x = self.embedding_dropout(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(axis=1) if self.class_token is None else x[:, 0])
