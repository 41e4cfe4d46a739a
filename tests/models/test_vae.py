"""VAE: a noisy code in training, its mean in evaluation."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.models.vae import VAE

X = np.random.default_rng(0).uniform(size=(3, 6)).astype(np.float32)


@pytest.fixture
def model(fill):
    sizes = {"input_size": 6, "hidden_size": 5, "latent_size": 2}
    return fill(lambda: VAE(**sizes, rngs=nnx.Rngs(0, noise=1)))


def test_evaluation_decodes_the_mean(model):
    model.eval()
    output = model(X)
    np.testing.assert_array_equal(output.logits, model.decoder(output.mean))
    np.testing.assert_array_equal(model(X).logits, output.logits)


def test_every_training_call_draws_new_noise(model):
    first, second = model(X), model(X)
    np.testing.assert_array_equal(first.mean, second.mean)
    assert np.abs(first.logits - second.logits).max() > 1e-3


def test_samples_have_the_mean_and_variance_of_the_code(model):
    mean, logvar = jnp.full((20000, 1), 0.7), jnp.full((20000, 1), np.log(0.25))
    codes = np.asarray(model.sample(mean, logvar))
    # Four standard errors of 20,000 draws.
    assert codes.mean() == pytest.approx(0.7, abs=4 * 0.5 / np.sqrt(20000))
    assert codes.var() == pytest.approx(0.25, abs=4 * 0.25 * np.sqrt(2 / 20000))


def test_noise_is_differentiable_in_mean_and_variance(model):
    def code(model, mean, logvar):
        return model.sample(mean, logvar).sum()

    mean, logvar = jnp.zeros((1, 2)), jnp.full((1, 2), 0.6)
    gradient = nnx.jit(nnx.grad(code, argnums=(1, 2)))
    to_mean, to_logvar = gradient(nnx.clone(model), mean, logvar)
    np.testing.assert_array_equal(to_mean, np.ones((1, 2)))
    # dz/dlogvar = exp(logvar/2)·ε/2, which is half of z itself where the mean is zero.
    np.testing.assert_allclose(to_logvar, model.sample(mean, logvar) / 2, rtol=1e-6)
