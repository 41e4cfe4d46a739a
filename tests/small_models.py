"""Small models and batches for tests of the core, the ones nobody planned for included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright import Weighted
from meshwright.models import build_model
from meshwright.tasks.classification import Classification
from meshwright.tasks.language_modeling import LanguageModeling
from meshwright.tasks.reconstruction import Reconstruction

WIDTH = 16
VOCABULARY = 64
LENGTH = 8
SAMPLES = 16


def fill(build, *, scale=0.3, seed=0):
    """Build a model with numpy weights: compiling an initializer takes longer than most tests."""
    random = np.random.default_rng(seed)

    def leaf_value(path, leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = random.integers(2**32, size=(*leaf.shape, 2), dtype=np.uint32)
            return jax.random.wrap_key_data(words)
        if not np.issubdtype(leaf.dtype, np.floating):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
        values = scale * random.normal(size=leaf.shape)
        if any(name in jax.tree_util.keystr(path) for name in ("'scale'", "'var'")):
            values = np.exp(values)
        return jax.device_put(values.astype(leaf.dtype))

    graphdef, state = nnx.split(nnx.eval_shape(build))
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(leaf_value, state))


SIZES = {
    "gpt": {
        "vocab_size": VOCABULARY,
        "context_length": LENGTH,
        "num_blocks": 2,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "dropout": 0.0,
    },
    "moe": {
        "vocab_size": VOCABULARY,
        "context_length": LENGTH,
        "num_blocks": 2,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "num_experts": 4,
        "expert_size": 16,
        "dropout": 0.0,
    },
    "lstm": {"vocab_size": VOCABULARY, "embed_size": WIDTH, "hidden_size": 32},
    "mlp": {"widths": (64, 32, 32, 16)},
    "linen_mlp": {"widths": (64, 32, 32, 16)},
    "conv": {"channels": (8, 16), "num_classes": 8},
    "vit": {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "num_classes": 8,
        "dropout": 0.0,
    },
    "vae": {"input_size": 64, "hidden_size": 32, "latent_size": 4},
}
SIZES["stacked_gpt"] = SIZES["gpt"]

TASKS = {
    **dict.fromkeys(
        ("gpt", "stacked_gpt", "moe", "lstm"),
        LanguageModeling(vocab_size=VOCABULARY, context_length=LENGTH),
    ),
    **dict.fromkeys(("conv", "vit"), Classification(input_shape=(8, 8, 1), num_classes=8)),
    **dict.fromkeys(
        ("mlp", "linen_mlp"),
        Classification(input_name="x", input_shape=(64,), num_classes=16),
    ),
    "vae": Reconstruction(input_shape=(64,)),
}


def builder(kind, **sizes):
    """Return a function of no arguments that builds a small model of a kind."""
    return lambda: build_model(kind, rngs=nnx.Rngs(0), **{**SIZES[kind], **sizes})


def task_batch(kind, seed=0, samples=SAMPLES):
    """Return the loss of a kind's task and a batch for it."""
    task = TASKS[kind]
    return task.loss, task.synthetic_batch(seed, samples)


def numbers(*shape, seed=0):
    """Return float32 numbers of this shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def vectors(samples=SAMPLES, width=WIDTH, seed=0):
    """Return a batch of inputs ``x`` and targets ``y``."""
    x = numbers(samples, width, seed=seed)
    return {"x": x, "y": np.roll(np.tanh(x), 1, axis=1)}


def square_loss(model, batch):
    """Return the mean squared error of ``model(x)`` against ``y``."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def weighted_loss(model, batch):
    """Return the squared error weighted by ``weight``, sample by sample."""
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)
    return Weighted((errors * batch["weight"]).sum(), batch["weight"].sum())


class Residual(nnx.Module):
    """x + down(tanh(up(x))): few operations, because most tests compile it."""

    def __init__(self, width=WIDTH, *, rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Residuals(nnx.Module):
    """Blocks one after another."""

    def __init__(self, num_blocks=2, width=WIDTH, *, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.blocks = nnx.List([Residual(width, rngs=rngs) for _ in range(num_blocks)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Turns(nnx.Module):
    """Blocks of two kinds, which take turns."""

    def __init__(self, num_blocks=4, *, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.blocks = nnx.List([Residual(rngs=rngs) for _ in range(num_blocks)])

    def __call__(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x) if number % 2 else jnp.sin(block(x))
        return x


class Odd(nnx.Module):
    """Sizes nothing divides, parameters without dims, one module called twice, two outputs."""

    def __init__(self, *, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.embed = nnx.Embed(101, 32, rngs=rngs)
        self.twice = nnx.Linear(32, 32, rngs=rngs)
        self.head = nnx.Linear(32, 101, rngs=rngs)
        self.temperature = nnx.Param(jnp.ones(()))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, tokens):
        self.calls[...] += 1
        x = self.embed(tokens)
        x = jnp.tanh(self.twice(jnp.tanh(self.twice(x))))
        return self.head(x) * self.temperature[...], x


def odd_batch(samples=SAMPLES, seed=0):
    """Return tokens for `Odd`."""
    return {"tokens": np.random.default_rng(seed).integers(101, size=(samples, 7), dtype=np.int32)}


def odd_loss(model, batch):
    """Return a loss of both outputs and two metrics."""
    logits, hidden = model(batch["tokens"][:, :-1])
    nats = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(
        logits, batch["tokens"][:, 1:, None], axis=-1
    ).squeeze(-1)
    return nats.mean() + 0.01 * (hidden**2).mean(), {
        "nats": nats.mean(),
        "hidden": Weighted((hidden**2).sum(), hidden.size),
    }


class Norms(nnx.Module):
    """Batch statistics and dropout between two layers."""

    def __init__(self, width=WIDTH, *, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.first = nnx.Linear(width, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(32, width, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def pair(rngs=None):
    """Return two models in a dict."""
    rngs = rngs or nnx.Rngs(0)
    return {"encoder": Residuals(2, rngs=rngs), "head": nnx.Linear(WIDTH, WIDTH, rngs=rngs)}


def pair_loss(models, batch):
    """Return the squared error of one model after the other."""
    return square_loss(lambda x: models["head"](models["encoder"](x)), batch)


def plain_value(out):
    """Return the scalar a loss means, as one device would compute it by hand."""
    out = out[0] if isinstance(out, tuple) else out
    return out.total / out.weight if isinstance(out, Weighted) else out


def with_values(model, change):
    """Return a copy of a model with every array changed; `nnx.Embed` follows its table's format."""
    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, jax.tree.map(change, state), copy=True)
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, nnx.Embed):
            module.dtype = module.embedding[...].dtype
    return copy


def double(model):
    """Return a copy of a model that computes in float64."""
    return with_values(
        model, lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    )


def plain_gradients(model, loss, batch):
    """Return loss and gradients by path, by Flax alone."""

    @functools.partial(nnx.value_and_grad)
    def run(model):
        return plain_value(loss(model, jax.tree.map(jnp.asarray, batch)))

    value, grads = run(model)
    return value, {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(grads)}
