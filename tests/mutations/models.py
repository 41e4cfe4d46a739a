"""A small transformer with everything that tensor parallelism divides, and its batches."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright import Weighted

VOCABULARY, WIDTH, HEADS, LENGTH, SAMPLES = 16, 8, 2, 4, 16


class Block(nnx.Module):
    """Attention with one projection for queries, keys and values, then a layer with dropout."""

    def __init__(self, dropout, *, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, bias_init=nnx.initializers.normal(1), rngs=rngs)

    def __call__(self, x):
        fused = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
        scores = jax.nn.softmax(jnp.einsum("bqhc,bkhc->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhc->bqhc", scores, v)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(self.dropout(jnp.tanh(self.up(x))))


class Transformer(nnx.Module):
    """A lookup, blocks, and the same table again as the head."""

    def __init__(self, num_blocks=1, dropout=0.25, *, rngs, block=Block):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([block(dropout, rngs=rngs) for _ in range(num_blocks)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class Deep(Transformer):
    """Two blocks, which can be rolled."""

    def __init__(self, *, rngs):
        super().__init__(2, rngs=rngs)


class Grown(nnx.Module):
    """Each layer appends its channels to those before it, as in a DenseNet."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(n * WIDTH, WIDTH, rngs=rngs) for n in (1, 2)])
        self.last = nnx.Linear(3 * WIDTH, WIDTH // 2, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = jnp.concatenate([x, jax.nn.relu(layer(x))], axis=-1)
        return self.last(x)


class Layer(nnx.Module):
    """x + dropout(down(tanh(up(x))))."""

    def __init__(self, dropout, *, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jnp.tanh(self.up(x))))


class Staged(Transformer):
    """Four blocks for the stages of a pipeline, smaller because stages take long to compile."""

    def __init__(self, *, rngs):
        super().__init__(4, rngs=rngs, block=Layer)


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


def tokens_of(step):
    """Return the tokens of a step, and weights that differ from sample to sample."""
    random = np.random.default_rng(step)
    return {
        "tokens": random.integers(VOCABULARY, size=(SAMPLES, LENGTH + 1), dtype=np.int32),
        "weight": random.integers(1, 5, size=SAMPLES).astype(np.float32),
    }
