"""VAE: a variational autoencoder with a Gaussian code and Bernoulli pixels."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VAEOutput:
    """Log-odds [B, P] of every pixel; mean and log-variance [B, Z] of the code of the input."""

    logits: Array
    mean: Array
    logvar: Array


class Encoder(nnx.Module):
    """q(z|x): [B, P] → mean and log-variance [B, Z]."""

    def __init__(
        self, *, input_size: int, hidden_size: int, latent_size: int, rngs: nnx.Rngs
    ) -> None:
        self.hidden = nnx.Linear(input_size, hidden_size, rngs=rngs)
        self.mean = nnx.Linear(hidden_size, latent_size, rngs=rngs)
        self.logvar = nnx.Linear(hidden_size, latent_size, rngs=rngs)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Return the mean and the log-variance of the code."""
        h = jax.nn.relu(self.hidden(x))
        return self.mean(h), self.logvar(h)


class Decoder(nnx.Module):
    """p(x|z): code [B, Z] → pixel log-odds [B, P]."""

    def __init__(
        self, *, input_size: int, hidden_size: int, latent_size: int, rngs: nnx.Rngs
    ) -> None:
        self.hidden = nnx.Linear(latent_size, hidden_size, rngs=rngs)
        self.out = nnx.Linear(hidden_size, input_size, rngs=rngs)

    def __call__(self, z: Array) -> Array:
        """Return the log-odds of every pixel."""
        return self.out(jax.nn.relu(self.hidden(z)))


class VAE(nnx.Module):
    """Encode, sample z = mean + exp(logvar/2)·ε with ε ~ N(0, 1), decode.

    ``model.eval()`` decodes the mean instead of a sample. An input has P pixels and its code Z
    numbers; every call draws from the stream ``noise``.
    """

    def __init__(
        self,
        *,
        input_size: int = 784,
        hidden_size: int = 512,
        latent_size: int = 20,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "latent_size": latent_size}
        self.encoder = Encoder(**sizes, rngs=rngs)
        self.decoder = Decoder(**sizes, rngs=rngs)
        self.noise = rngs["noise"].fork()
        self.deterministic = False

    def __call__(self, x: Array) -> VAEOutput:
        """Reconstruct x [B, ...], whose other dims are flattened to P."""
        mean, logvar = self.encoder(x.reshape(x.shape[0], -1))
        z = mean if self.deterministic else self.sample(mean, logvar)
        return VAEOutput(logits=self.decoder(z), mean=mean, logvar=logvar)

    def sample(self, mean: Array, logvar: Array) -> Array:
        """Draw one code [B, Z] per input, differentiable in mean and log-variance."""
        epsilon = jax.random.normal(self.noise(), mean.shape, mean.dtype)
        return mean + jnp.exp(logvar / 2) * epsilon
