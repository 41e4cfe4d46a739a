"""ConvNet: a small residual network with batch normalisation."""

from collections.abc import Sequence
from itertools import pairwise

import jax
from flax import nnx
from jax import Array


class ResidualBlock(nnx.Module):
    """relu(shortcut(x) + conv-norm-relu-conv-norm(x)). [B, H, W, C] → [B, H/s, W/s, C']."""

    def __init__(self, *, channels_in: int, channels: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(channels_in, channels, (3, 3), strides=stride, rngs=rngs)
        self.norm1 = nnx.BatchNorm(channels, rngs=rngs)
        self.conv2 = nnx.Conv(channels, channels, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(channels, rngs=rngs)
        same_shape = stride == 1 and channels_in == channels
        self.shortcut = (
            None
            if same_shape
            else nnx.Conv(channels_in, channels, (1, 1), strides=stride, rngs=rngs)
        )

    def __call__(self, x: Array) -> Array:
        """Refine x [B, H, W, C] and, where the block strides, halve its resolution."""
        y = jax.nn.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return jax.nn.relu(shortcut + y)


class ConvNet(nnx.Module):
    """Stem, one residual block per stage, global mean, linear head.

    Every stage has its channels, and after the first it halves the resolution.
    """

    def __init__(
        self,
        *,
        channels_in: int = 1,
        channels: Sequence[int] = (16, 32, 64),
        num_classes: int = 10,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = nnx.Conv(channels_in, channels[0], (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(channels[0], rngs=rngs)
        first = ResidualBlock(channels_in=channels[0], channels=channels[0], stride=1, rngs=rngs)
        rest = [
            ResidualBlock(channels_in=i, channels=o, stride=2, rngs=rngs)
            for i, o in pairwise(channels)
        ]
        self.blocks = nnx.List([first, *rest])
        self.head = nnx.Linear(channels[-1], num_classes, rngs=rngs)

    def __call__(self, image: Array) -> Array:
        """Return class logits [B, num_classes] for images [B, H, W, channels_in]."""
        x = jax.nn.relu(self.norm(self.stem(image)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))
