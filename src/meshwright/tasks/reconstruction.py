"""Reconstruction: the evidence lower bound of a variational autoencoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.tasks.task import Batch, Metrics, read_field, read_weights, weigh
from meshwright.weighted import Weighted


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Negative evidence lower bound with Bernoulli pixels and a standard normal prior.

    A batch holds ``image`` or ``x`` [B, ...] with values from 0 to 1, and optionally ``mask`` [B]:
    how much each sample counts. The model returns an object with ``logits``, the log-odds of every
    pixel being on [B, P], and ``mean`` and ``logvar`` of the code [B, Z].

    Attributes:
        input_name: the field the example and synthetic batches hold, ``image`` or ``x``.
        input_shape: shape of one sample.
    """

    input_name: str = "x"
    input_shape: tuple[int, ...] = (784,)

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Weighted, Metrics]:
        """Return nats per sample, and its two parts as ``reconstruction`` and ``kl``."""
        x = read_field(batch, "image", "x")
        output = model(x)
        missed = bernoulli_nats(output.logits, x.reshape(x.shape[0], -1))
        divergence = normal_kl(output.mean, output.logvar)
        weights = read_weights(batch, missed)
        metrics = {"reconstruction": weigh(missed, weights), "kl": weigh(divergence, weights)}
        return weigh(missed + divergence, weights), metrics

    def example_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of the input: float32 [B, ...]."""
        return {self.input_name: jax.ShapeDtypeStruct((batch_size, *self.input_shape), np.float32)}

    def synthetic_batch(self, seed: int, batch_size: int) -> dict[str, np.ndarray]:
        """Return inputs from 0 to 1 that vary in four hidden directions only."""
        # Independent of `seed`: every batch must vary in the same directions.
        directions = np.random.default_rng(0).normal(size=(4, int(np.prod(self.input_shape))))
        code = np.random.default_rng(seed).normal(size=(batch_size, 4))
        x = 1 / (1 + np.exp(-code @ directions))
        return {self.input_name: x.reshape(batch_size, *self.input_shape).astype(np.float32)}


def bernoulli_nats(logits: Array, x: Array) -> Array:
    """Return -log p(x) summed over pixels: logits [B, P], x [B, P] → [B]."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return (jax.nn.softplus(logits) - x * logits).sum(axis=-1)


def normal_kl(mean: Array, logvar: Array) -> Array:
    """Return KL(N(mean, exp(logvar)) ‖ N(0, 1)) summed over the code: [B, Z] → [B]."""
    mean, logvar = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in (mean, logvar))
    return 0.5 * (mean**2 + jnp.exp(logvar) - 1 - logvar).sum(axis=-1)
