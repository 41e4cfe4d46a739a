"""Models that learn representations: two towers, BYOL, a quantized and a tied autoencoder."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from zoo.entry import Entry, integers, normal


class MLP(nnx.Module):
    def __init__(self, inputs, hidden, outputs, rngs):
        self.up = nnx.Linear(inputs, hidden, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, outputs, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


class TwoTowers(nnx.Module):
    """Images and captions embedded into one space, as in CLIP."""

    def __init__(self, rngs, width=16):
        self.image = MLP(32, 64, width, rngs)
        self.words = nnx.Embed(64, 32, rngs=rngs)
        self.text = MLP(32, 64, width, rngs)
        self.log_temperature = nnx.Param(jnp.log(10.0))

    def __call__(self, image, words):
        image, text = self.image(image), self.text(self.words(words).mean(axis=1))
        image = image / jnp.linalg.norm(image, axis=-1, keepdims=True)
        text = text / jnp.linalg.norm(text, axis=-1, keepdims=True)
        return jnp.exp(self.log_temperature[...]) * image @ text.T


def contrastive_loss(model, batch):
    """Each image has its caption, and the captions of all others are its negatives."""
    logits = model(batch["image"], batch["words"])
    label = jnp.arange(len(logits))
    nats = optax.softmax_cross_entropy_with_integer_labels
    return (nats(logits, label) + nats(logits.T, label)).mean() / 2


class BYOL(nnx.Module):
    """Predicts a moving average of itself."""

    def __init__(self, rngs, width=16):
        self.online = MLP(32, 64, width, rngs)
        self.predictor = MLP(width, 32, width, rngs)
        self.target = MLP(32, 64, width, rngs)

    def move_target(self, rate=0.05):
        online, target = nnx.state(self.online), nnx.state(self.target)
        nnx.update(self.target, jax.tree.map(lambda o, t: t + rate * (o - t), online, target))


def bootstrap_loss(model, batch):
    def distance(a, b):
        goal = jax.lax.stop_gradient(model.target(b))
        return optax.cosine_distance(model.predictor(model.online(a)), goal).mean()

    loss = distance(batch["one"], batch["two"]) + distance(batch["two"], batch["one"])
    model.move_target()
    return loss


class Average(nnx.Variable):
    """Kept up by moving averages instead of gradients."""


class Quantizer(nnx.Module):
    def __init__(self, codes, width, rngs, decay=0.9):
        self.decay = decay
        self.codes = Average(jax.random.normal(rngs.params(), (codes, width)))
        self.counts = Average(jnp.ones(codes))
        self.sums = Average(self.codes[...] + 0.0)

    def __call__(self, x):
        codes = self.codes[...]
        distances = (x**2).sum(-1, keepdims=True) - 2 * x @ codes.T + (codes**2).sum(-1)
        nearest = jax.nn.one_hot(distances.argmin(-1), len(codes))
        quantized = nearest @ codes
        flat, member = (
            jax.lax.stop_gradient(x).reshape(-1, x.shape[-1]),
            nearest.reshape(-1, len(codes)),
        )
        self.counts[...] = self.decay * self.counts + (1 - self.decay) * member.sum(0)
        self.sums[...] = self.decay * self.sums + (1 - self.decay) * member.T @ flat
        self.codes[...] = self.sums / (self.counts[...] + 1e-5)[:, None]
        commitment = ((x - jax.lax.stop_gradient(quantized)) ** 2).mean()
        return x + jax.lax.stop_gradient(quantized - x), commitment


class VQ(nnx.Module):
    """A quantized autoencoder: four codes for each input."""

    def __init__(self, rngs, width=8, codes=16):
        self.encoder = MLP(32, 64, 4 * width, rngs)
        self.quantizer = Quantizer(codes, width, rngs)
        self.decoder = MLP(4 * width, 64, 32, rngs)

    def __call__(self, x):
        latent = self.encoder(x).reshape(len(x), 4, -1)
        quantized, commitment = self.quantizer(latent)
        return self.decoder(quantized.reshape(len(x), -1)), commitment


def quantized_loss(model, batch):
    out, commitment = model(batch["one"])
    error = ((out - batch["one"]) ** 2).mean()
    return error + 0.25 * commitment, {"error": error}


class Tied(nnx.Module):
    """An autoencoder whose decoder is the transpose of its encoder."""

    def __init__(self, rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.second = nnx.Linear(64, 8, rngs=rngs)
        self.bias1 = nnx.Param(jnp.zeros(64))
        self.bias2 = nnx.Param(jnp.zeros(32))

    def __call__(self, x):
        code = self.second(nnx.tanh(self.first(x)))
        x = nnx.tanh(code @ self.second.kernel.T + self.bias1)
        return x @ self.first.kernel.T + self.bias2


def reconstruction_loss(model, batch):
    return ((model(batch["one"]) - batch["one"]) ** 2).mean()


def pairs(random):
    return {"image": normal(random, 32), "words": integers(random, 64, 6)}


def views(random):
    x = normal(random, 32)
    return {"one": x + 0.1 * normal(random, 32), "two": x + 0.1 * normal(random, 32)}


ZOO = {
    "two towers": Entry(TwoTowers, contrastive_loss, pairs),
    "BYOL": Entry(
        BYOL,
        bootstrap_loss,
        views,
        trainable=nnx.All(nnx.Param, nnx.Not(nnx.PathContains("target"))),
    ),
    "quantized autoencoder": Entry(VQ, quantized_loss, views),
    "tied autoencoder": Entry(Tied, reconstruction_loss, views),
}
