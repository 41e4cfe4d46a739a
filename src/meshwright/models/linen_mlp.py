"""linen_mlp: a Flax Linen module converted to NNX with Flax's bridge."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class LinenMLP(nn.Module):
    """Dense layers with ReLU between them, of these widths, written in Linen."""

    widths: Sequence[int]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return outputs [B, widths[-1]] for x [B, ...], whose other dims are flattened."""
        x = x.reshape(x.shape[0], -1)
        for width in self.widths[:-1]:
            x = jax.nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def linen_mlp(
    *, widths: Sequence[int] = (784, 512, 512, 256, 10), rngs: nnx.Rngs
) -> nnx.bridge.ToNNX:
    """Build a `LinenMLP` as an NNX module, its variables created from a sample of one row."""
    model = nnx.bridge.ToNNX(LinenMLP(widths=tuple(widths[1:])), rngs=rngs)
    model.lazy_init(jnp.zeros((1, widths[0])))
    return model
