"""MLP: fully connected layers with ReLU between them."""

from collections.abc import Sequence
from itertools import pairwise

import jax
from flax import nnx
from jax import Array


class MLP(nnx.Module):
    """Linear layers of these widths: of the input, of every hidden layer, and of the output."""

    def __init__(self, *, widths: Sequence[int] = (784, 512, 512, 256, 10), rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in pairwise(widths)])

    def __call__(self, x: Array) -> Array:
        """Return outputs [B, widths[-1]] for x [B, ...], whose other dims are flattened."""
        x = x.reshape(x.shape[0], -1)
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)
