"""linen_mlp: a Linen module that behaves like the NNX one."""

import jax
import numpy as np
from flax import nnx

from meshwright.models.linen_mlp import linen_mlp
from meshwright.models.mlp import MLP

WIDTHS = (6, 5, 4, 3)


def test_equals_the_nnx_mlp_with_the_same_weights(fill):
    linen = fill(lambda: linen_mlp(widths=WIDTHS, rngs=nnx.Rngs(0)))
    plain = fill(lambda: MLP(widths=WIDTHS, rngs=nnx.Rngs(0)), seed=1)
    for i, layer in enumerate(plain.layers):
        dense = getattr(linen, f"Dense_{i}")
        layer.kernel[...] = dense["kernel"][...]
        layer.bias[...] = dense["bias"][...]
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    np.testing.assert_allclose(linen(x), plain(x), atol=1e-6)


def test_parameters_are_nnx_parameters_and_get_gradients(fill):
    model = fill(lambda: linen_mlp(widths=WIDTHS, rngs=nnx.Rngs(0)))
    x = np.ones((4, 6), np.float32)
    gradients = nnx.jit(nnx.grad(lambda model: (model(x) ** 2).mean()))(model)
    leaves = jax.tree.leaves(gradients)
    assert len(leaves) == 6
    assert all(np.abs(leaf).max() > 0 for leaf in leaves)
