"""ResNet: the published network, followed step by step in NumPy."""

import jax
import numpy as np
import pytest
from flax import nnx

from meshwright.models.resnet import Bottleneck, ResNet

IMAGES = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
EPSILON = 1e-5


@pytest.fixture
def model(fill):
    return fill(lambda: ResNet(depths=(2, 1), width=4, num_classes=5, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def run():
    return nnx.jit(lambda model, image: model(image))


def test_evaluation_equals_numpy(model, run):
    model.eval()
    expected = published_resnet(arrays_of(model), IMAGES, training=False)
    np.testing.assert_allclose(run(model, IMAGES), expected, rtol=1e-4, atol=1e-4)


def test_training_equals_numpy(model, run):
    expected = published_resnet(arrays_of(model), IMAGES, training=True)
    np.testing.assert_allclose(run(model, IMAGES), expected, rtol=1e-4, atol=1e-4)


def test_blocks_start_as_the_identity_if_asked_to():
    @jax.jit
    def refine(x):
        # The generator that compiles fastest on CPU.
        rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))
        sizes = {"channels_in": 8, "channels": 2, "stride": 1, "rngs": rngs}
        return [Bottleneck(**sizes, zero_init_last=zero)(x) for zero in (True, False)]

    x = np.abs(IMAGES[:, :4, :4, :1] * np.ones(8, np.float32))
    same, refined = refine(x)
    np.testing.assert_array_equal(same, x)
    assert np.abs(refined - x).max() > 0.1


def arrays_of(model):
    paths = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return {".".join(map(str, path)): np.float64(leaf[...]) for path, leaf in paths}


def published_resnet(arrays, image, *, training):
    """Follow He et al. (2015) with the stride in the 3 × 3 convolution, in float64."""

    def norm(x, name):
        mean, var = arrays[f"{name}.mean"], arrays[f"{name}.var"]
        if training:
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        normal = (x - mean) / np.sqrt(var + EPSILON)
        return normal * arrays[f"{name}.scale"] + arrays[f"{name}.bias"]

    def conv(x, name, stride=1):
        kernel = arrays[f"{name}.kernel"]
        return np.einsum("bhwijc,ijco->bhwo", windows(x, len(kernel), stride), kernel)

    def relu(x):
        return np.maximum(x, 0)

    x = relu(norm(conv(image.astype(np.float64), "stem", 2), "norm"))
    x = windows(x, 3, 2, fill=-np.inf).max((3, 4))
    for block, stride in (("blocks.0", 1), ("blocks.1", 1), ("blocks.2", 2)):
        y = relu(norm(conv(x, f"{block}.conv1"), f"{block}.norm1"))
        y = relu(norm(conv(y, f"{block}.conv2", stride), f"{block}.norm2"))
        y = norm(conv(y, f"{block}.conv3"), f"{block}.norm3")
        if block != "blocks.1":
            x = norm(conv(x, f"{block}.shortcut", stride), f"{block}.shortcut_norm")
        x = relu(x + y)
    return x.mean((1, 2)) @ arrays["head.kernel"] + arrays["head.bias"]


def windows(x, size, stride, fill=0.0):
    """Return every window [B, H/s, W/s, size, size, C], with a margin of (size - 1) / 2."""
    margin = (size - 1) // 2
    padded = np.pad(x, ((0, 0), (margin,) * 2, (margin,) * 2, (0, 0)), constant_values=fill)
    sliding = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(1, 2))
    return sliding[:, ::stride, ::stride].transpose(0, 1, 2, 4, 5, 3)
