"""MLP: matrix products with ReLU between them."""

import numpy as np
import pytest
from flax import nnx

from meshwright.models.mlp import MLP

pytestmark = pytest.mark.quick


def test_equals_numpy(fill):
    model = fill(lambda: MLP(widths=(6, 5, 4, 3), rngs=nnx.Rngs(0)))
    image = np.random.default_rng(0).normal(size=(2, 3, 2, 1)).astype(np.float32)
    x = image.reshape(2, 6).astype(np.float64)
    for i, layer in enumerate(model.layers):
        x = (np.maximum(x, 0) if i else x) @ np.asarray(layer.kernel[...], np.float64)
        x += np.asarray(layer.bias[...], np.float64)
    np.testing.assert_allclose(model(image), x, atol=1e-5)


def test_default_widths_are_784_512_512_256_10():
    model = nnx.eval_shape(lambda: MLP(rngs=nnx.Rngs(0)))
    shapes = [layer.kernel.shape for layer in model.layers]
    assert shapes == [(784, 512), (512, 512), (512, 256), (256, 10)]
