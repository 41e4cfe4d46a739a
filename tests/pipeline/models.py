"""Small models with blocks, and the ways in which blocks hang together with the rest."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright import Weighted

VOCABULARY, WIDTH, LENGTH, SAMPLES = 12, 8, 4, 16


class Block(nnx.Module):
    """x + dropout(down(tanh(up(x))))."""

    def __init__(self, dropout, *, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jnp.tanh(self.up(x))))


class Tokens(nnx.Module):
    """A language model: lookup, blocks, the same table again or a layer of its own as the head."""

    def __init__(self, num_blocks=4, dropout=0.0, tied=False):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List([Block(dropout, rngs=rngs) for _ in range(num_blocks)])
        self.head = None if tied else nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


def tokens_loss(model, batch):
    """Return the cross-entropy weighted sample by sample, and how often the guess is right."""
    logits = model(batch["tokens"][:, :-1])
    target = batch["tokens"][:, 1:]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1)[..., 0]
    weight = jnp.broadcast_to(batch["weight"][:, None], target.shape)
    right = (logits.argmax(-1) == target) * weight
    return Weighted(-(picked * weight).sum(), weight.sum()), {
        "accuracy": Weighted(right.sum(), weight.sum())
    }


def tokens_batch(samples=SAMPLES, seed=0):
    random = np.random.default_rng(seed)
    return {
        "tokens": random.integers(VOCABULARY, size=(samples, LENGTH + 1), dtype=np.int32),
        "weight": random.integers(1, 5, size=samples).astype(np.float32),
    }


class Entangled(nnx.Module):
    """Blocks that share a weight and a random stream, keep statistics and report a loss each."""

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x, scale, mask, noise):
            y = jnp.tanh(self.norm(self.layer(x))) * scale * mask
            y = y + 0.1 * jax.random.normal(noise.dropout(), y.shape, jnp.float32)
            return x + y, (y**2).mean()

    def __init__(self, num_blocks=2):
        rngs = nnx.Rngs(0)
        self.noise = nnx.Rngs(dropout=3)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((WIDTH,)))
        self.blocks = nnx.List([self.Block(rngs=rngs) for _ in range(num_blocks)])

    def __call__(self, x):
        mask = x[:, :1] > 0
        x = self.first(x)
        penalty = 0.0
        for block in self.blocks:
            x, own = block(x, self.scale[...] * 2, mask, self.noise)
            penalty = penalty + own
        return x, penalty


def entangled_loss(model, batch):
    out, penalty = model(batch["x"])
    return ((out - batch["y"]) ** 2).mean() + 0.01 * penalty
