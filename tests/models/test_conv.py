"""ConvNet: batch statistics in training, running statistics in evaluation."""

import jax
import numpy as np
import pytest
from flax import nnx

from meshwright.models.conv import ConvNet

pytestmark = pytest.mark.quick

IMAGES = np.random.default_rng(0).normal(loc=2.0, size=(4, 8, 8, 1)).astype(np.float32)


@pytest.fixture
def model(fill):
    return fill(lambda: ConvNet(channels=(4, 8), num_classes=3, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def run():
    return nnx.jit(lambda model, image: model(image))


def test_evaluation_judges_each_image_alone(model, run):
    model.eval()
    whole = run(model, IMAGES)
    changed = IMAGES.copy()
    changed[1:] *= -1
    assert whole.shape == (4, 3)
    np.testing.assert_allclose(run(model, changed)[0], whole[0], atol=1e-6)


def test_training_normalises_over_the_batch(model, run):
    model.train()
    changed = IMAGES.copy()
    changed[1:] *= -1
    assert np.abs(run(model, changed)[0] - run(model, IMAGES)[0]).max() > 1e-2


def test_training_moves_the_running_mean_towards_the_batch_mean(model, run):
    model.train()
    before = np.asarray(model.norm.mean[...])
    run(model, IMAGES)
    seen = np.asarray(model.stem(IMAGES)).mean(axis=(0, 1, 2))
    expected = 0.99 * before + 0.01 * seen
    np.testing.assert_allclose(model.norm.mean[...], expected, atol=1e-6)


def test_later_stages_halve_the_resolution(model):
    x = jax.ShapeDtypeStruct((1, 8, 8, 4), np.float32)
    shapes = [nnx.eval_shape(lambda b, x: b(x), block, x).shape for block in model.blocks]
    assert shapes == [(1, 8, 8, 4), (1, 4, 4, 8)]
