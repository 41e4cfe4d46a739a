"""Models of densities: a normalizing flow and a mixture density network."""

import jax
import jax.numpy as jnp
from flax import nnx
from zoo.entry import Entry, normal


class Coupling(nnx.Module):
    """Scales and shifts one half by functions of the other, then swaps them."""

    def __init__(self, width, hidden, rngs):
        self.up = nnx.Linear(width // 2, hidden, rngs=rngs)
        self.scale = nnx.Linear(hidden, width // 2, rngs=rngs)
        self.shift = nnx.Linear(hidden, width // 2, rngs=rngs)

    def __call__(self, x, log_det):
        kept, moved = jnp.split(x, 2, axis=-1)
        hidden = nnx.relu(self.up(kept))
        log_scale = nnx.tanh(self.scale(hidden))
        moved = moved * jnp.exp(log_scale) + self.shift(hidden)
        return jnp.concatenate([moved, kept], axis=-1), log_det + log_scale.sum(-1)


class Flow(nnx.Module):
    def __init__(self, rngs, width=16, depth=4):
        self.blocks = nnx.List([Coupling(width, 32, rngs) for _ in range(depth)])

    def __call__(self, x):
        log_det = jnp.zeros(len(x))
        for block in self.blocks:
            x, log_det = block(x, log_det)
        return x, log_det


def flow_loss(model, batch):
    z, log_det = model(batch["x"])
    log_density = jax.scipy.stats.norm.logpdf(z).sum(-1) + log_det
    return -log_density.mean()


class MixtureDensity(nnx.Module):
    """The parameters of a mixture of Gaussians, as functions of the input."""

    def __init__(self, rngs, parts=4, targets=2):
        self.parts, self.targets = parts, targets
        self.body = nnx.Linear(16, 64, rngs=rngs)
        self.weight = nnx.Linear(64, parts, rngs=rngs)
        self.mean = nnx.Linear(64, parts * targets, rngs=rngs)
        self.spread = nnx.Linear(64, parts * targets, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.tanh(self.body(x))
        shape = (-1, self.parts, self.targets)
        mean, spread = self.mean(hidden).reshape(shape), self.spread(hidden).reshape(shape)
        return nnx.log_softmax(self.weight(hidden)), mean, nnx.softplus(spread) + 1e-3


def mixture_loss(model, batch):
    log_weight, mean, spread = model(batch["x"])
    density = jax.scipy.stats.norm.logpdf(batch["y"][:, None], mean, spread).sum(-1)
    return -jax.nn.logsumexp(log_weight + density, axis=-1).mean()


def points(random):
    return {"x": normal(random, 16), "y": normal(random, 2)}


ZOO = {
    "normalizing flow": Entry(Flow, flow_loss, points, blocks=True),
    "mixture density network": Entry(MixtureDensity, mixture_loss, points),
}
