"""Reconstruction: the two halves of the evidence lower bound against independent sums."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.tasks.reconstruction import Reconstruction, bernoulli_nats, normal_kl

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(size=(4, 5)).astype(np.float32)
LOGITS = RANDOM.normal(scale=3.0, size=(4, 5))
MEAN, LOGVAR = RANDOM.normal(size=(2, 4, 3))


def model(x):
    """A model that always answers the same."""
    arrays = {"logits": LOGITS, "mean": MEAN, "logvar": LOGVAR}
    return SimpleNamespace(**{name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()})


def reference_nats():
    on = 1 / (1 + np.exp(-LOGITS))
    return -(X * np.log(on) + (1 - X) * np.log(1 - on)).sum(axis=-1)


def test_pixels_equal_the_bernoulli_log_likelihood():
    got = jax.jit(bernoulli_nats)(jnp.asarray(LOGITS, jnp.float32), X)
    np.testing.assert_allclose(got, reference_nats(), rtol=1e-5)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1.5, 0.5), (-0.3, 2.0)])
def test_kl_equals_the_integral(mean, deviation):
    z = np.linspace(mean - 12 * deviation, mean + 12 * deviation, 200_001)
    log_q = -0.5 * ((z - mean) / deviation) ** 2 - np.log(deviation)
    log_p = -0.5 * z**2
    density = np.exp(log_q) / np.sqrt(2 * np.pi)
    integral = (density * (log_q - log_p)).sum() * (z[1] - z[0])
    got = jax.jit(normal_kl)(jnp.full((1, 1), mean), jnp.full((1, 1), 2 * np.log(deviation)))
    np.testing.assert_allclose(got, [integral], rtol=1e-5, atol=1e-6)


def test_loss_is_the_sum_of_its_parts_per_sample():
    mask = np.array([1, 0, 1, 1], bool)
    task = Reconstruction(input_shape=(5,))
    loss, metrics = jax.jit(lambda batch: task.loss(model, batch))({"x": X, "mask": mask})
    kl = 0.5 * (MEAN**2 + np.exp(LOGVAR) - 1 - LOGVAR).sum(axis=-1)
    assert loss.weight == 3
    np.testing.assert_allclose(loss.mean, (reference_nats() + kl)[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["reconstruction"].mean, reference_nats()[mask].mean(), 1e-5)
    np.testing.assert_allclose(metrics["kl"].mean, kl[mask].mean(), rtol=1e-5)


def test_synthetic_inputs_are_probabilities_of_few_directions():
    x = Reconstruction(input_name="image", input_shape=(6, 5, 1)).synthetic_batch(0, 32)["image"]
    assert x.min() >= 0
    assert x.max() <= 1
    odds = np.log(x / (1 - x)).reshape(32, 30)
    assert np.linalg.matrix_rank(odds, tol=1e-3) == 4
