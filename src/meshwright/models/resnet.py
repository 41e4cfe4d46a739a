"""ResNet: residual networks of bottleneck blocks; the default sizes are those of ResNet-50."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

EXPANSION = 4
"""A block has four times as many channels outside as in its 3 × 3 convolution."""


def _conv(channels_in: int, channels: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    # Padded alike on both sides. "SAME" pads an even input only at its end if the stride is 2,
    # which would shift what published weights look at.
    margin = (size - 1) // 2
    return nnx.Conv(
        channels_in,
        channels,
        (size, size),
        strides=stride,
        padding=[(margin, margin), (margin, margin)],
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        rngs=rngs,
    )


_Norm = partial(nnx.BatchNorm, momentum=0.9, epsilon=1e-5)


class Bottleneck(nnx.Module):
    """relu(shortcut(x) + 1×1, 3×3 and 1×1 convolutions of x), each followed by a norm.

    The 3 × 3 convolution has the stride (ResNet v1.5). [B, H, W, C] → [B, H/s, W/s, 4·channels].
    """

    def __init__(
        self, *, channels_in: int, channels: int, stride: int, zero_init_last: bool, rngs: nnx.Rngs
    ) -> None:
        last_scale = nnx.initializers.zeros if zero_init_last else nnx.initializers.ones
        channels_out = EXPANSION * channels
        self.conv1 = _conv(channels_in, channels, 1, 1, rngs)
        self.norm1 = _Norm(channels, rngs=rngs)
        self.conv2 = _conv(channels, channels, 3, stride, rngs)
        self.norm2 = _Norm(channels, rngs=rngs)
        self.conv3 = _conv(channels, channels_out, 1, 1, rngs)
        self.norm3 = _Norm(channels_out, scale_init=last_scale, rngs=rngs)
        same_shape = stride == 1 and channels_in == channels_out
        self.shortcut = None if same_shape else _conv(channels_in, channels_out, 1, stride, rngs)
        self.shortcut_norm = None if same_shape else _Norm(channels_out, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Refine x [B, H, W, C] and, where the block strides, halve its resolution."""
        y = jax.nn.relu(self.norm1(self.conv1(x)))
        y = jax.nn.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return jax.nn.relu(x + y)


class ResNet(nnx.Module):
    """Stem, bottleneck blocks at four resolutions, global mean, linear head.

    Args:
        depths: blocks at each resolution; every resolution after the first is half the one before.
        width: channels of the stem, and of the first blocks inside; doubled with each resolution.
        zero_init_last: start the scale of each block's last norm at zero, so that every block is
            the identity at first. This trains better in large batches.
    """

    def __init__(
        self,
        *,
        channels_in: int = 3,
        depths: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        num_classes: int = 1000,
        zero_init_last: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = _conv(channels_in, width, 7, 2, rngs)
        self.norm = _Norm(width, rngs=rngs)
        blocks: list[Bottleneck] = []
        outside = width
        for level, depth in enumerate(depths):
            channels = width * 2**level
            for number in range(depth):
                block = Bottleneck(
                    channels_in=outside,
                    channels=channels,
                    stride=2 if level and not number else 1,
                    zero_init_last=zero_init_last,
                    rngs=rngs,
                )
                blocks.append(block)
                outside = EXPANSION * channels
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(outside, num_classes, rngs=rngs)

    def __call__(self, image: Array) -> Array:
        """Return class logits [B, num_classes] for images [B, H, W, channels_in]."""
        x = jax.nn.relu(self.norm(self.stem(image)))
        margins = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), margins)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))
