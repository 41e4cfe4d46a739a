"""Which losses devices may compute for their own samples: verdicts are compared with numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from program.programs import trace

import meshwright as mw
from meshwright.errors import UserError
from meshwright.program.dims.sample_mean import check_mean
from meshwright.program.trace.traced_loss import read_loss
from meshwright.sharding.decide import dim_classes

WIDTH = 6
random = np.random.default_rng(0)
BATCH = {
    "x": random.normal(size=(8, WIDTH)).astype(np.float32),
    "weight": random.uniform(0.1, 2.0, size=8).astype(np.float32),
    "label": np.arange(8) % WIDTH,
}


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)


def errors(z, batch):
    return optax.softmax_cross_entropy_with_integer_labels(z, batch["label"])


def picked(z, batch, positions):
    return -jax.nn.log_softmax(z)[positions, batch["label"]].mean()


def chunked(z):
    total, _ = jax.lax.scan(lambda s, i: (s + (z[:, i] ** 2).sum(), None), 0.0, jnp.arange(WIDTH))
    return total / len(z)


def running(z):
    return jax.lax.scan(lambda s, row: (0.9 * s + (row**2).sum(), None), 0.0, z)[0]


def branches(z):
    return jax.lax.cond(z.shape[0] > 0, lambda: (z**2).mean(), lambda: 2 * (z**2).mean())


def of_weights(model):
    return (model.linear.kernel[...] ** 2).sum()


MEANS = {
    "mean": lambda m, z, b: (z**2).mean(),
    "mean of long rows": lambda m, z, b: mw.Weighted(
        (z**2).sum(), jnp.ones((len(z), 2**15)).sum() / 2**15
    ),
    "cross entropy": lambda m, z, b: errors(z, b).mean(),
    "own position": lambda m, z, b: picked(z, b, jnp.arange(len(z))),
    "one hot": lambda m, z, b: (jax.nn.log_softmax(z) * jax.nn.one_hot(b["label"], WIDTH)).mean(),
    "weighted": lambda m, z, b: mw.Weighted((errors(z, b) * b["weight"]).sum(), b["weight"].sum()),
    "weighted by number": lambda m, z, b: mw.Weighted(errors(z, b).sum(), len(z)),
    "weighted by ones": lambda m, z, b: mw.Weighted(errors(z, b).sum(), jnp.ones(len(z)).sum()),
    "divided before": lambda m, z, b: (errors(z, b) / len(z)).sum(),
    "of weights too": lambda m, z, b: errors(z, b).mean() + of_weights(m),
    "two means": lambda m, z, b: errors(z, b).mean() + 0.1 * (z**2).mean(),
    "metrics": lambda m, z, b: (errors(z, b).mean(), {"accuracy": (z.argmax(-1) == 0).mean()}),
    "mapped": lambda m, z, b: jax.vmap(lambda a, c: ((a - c) ** 2).mean())(z, b["x"]).mean(),
    "chosen": lambda m, z, b: jnp.where(b["weight"] > 1, errors(z, b), 0.0).mean(),
    "product": lambda m, z, b: jnp.vdot(errors(z, b), b["weight"]) / len(z),
    "in chunks": lambda m, z, b: chunked(z),
    "ones": lambda m, z, b: (jnp.ones((len(z), WIDTH)) * z**2).mean(),
    "zeros": lambda m, z, b: jnp.maximum(z, jnp.zeros_like(z)).mean(),
    "checkpointed": lambda m, z, b: jax.checkpoint(lambda a: errors(a, b).mean())(z),
    "branches": lambda m, z, b: branches(z),
    "scaled by a weight": lambda m, z, b: errors(z, b).mean() * jnp.exp(m.linear.bias[0]),
}
OTHERS = {
    "masked": lambda m, z, b: (errors(z, b) * b["weight"]).sum() / b["weight"].sum(),
    "at least one": lambda m, z, b: mw.Weighted(
        (errors(z, b) * b["weight"]).sum(), jnp.maximum(b["weight"].sum(), 9.0)
    ),
    "sum": lambda m, z, b: errors(z, b).sum(),
    "of weights beside a sum": lambda m, z, b: mw.Weighted(
        errors(z, b).sum() + of_weights(m), b["weight"].sum()
    ),
    "contrast": lambda m, z, b: optax.softmax_cross_entropy_with_integer_labels(
        z @ z.T, jnp.arange(len(z))
    ).mean(),
    "deviation": lambda m, z, b: z.std(0).mean(),
    "pairs": lambda m, z, b: ((z[:, None] - z[None]) ** 2).mean(),
    "covariance": lambda m, z, b: ((z.T @ z) ** 2).mean(),
    "logsumexp": lambda m, z, b: jax.nn.logsumexp(z, 0).mean(),
    "rolled": lambda m, z, b: (z * jnp.roll(z, 1, 0)).mean(),
    "flipped": lambda m, z, b: (z * z[::-1]).mean(),
    "sorted": lambda m, z, b: (jnp.sort(z, 0) * b["x"]).mean(),
    "position": lambda m, z, b: (z**2 * jnp.arange(len(z))[:, None]).mean(),
    "next position": lambda m, z, b: picked(z, b, (jnp.arange(len(z)) + 1) % len(z)),
    "root": lambda m, z, b: jnp.sqrt((z**2).mean()),
    "first": lambda m, z, b: (z[0] ** 2).mean(),
    "half": lambda m, z, b: (z[: len(z) // 2] ** 2).mean(),
    "largest": lambda m, z, b: errors(z, b).max(),
    "running": lambda m, z, b: running(z),
    "by a sum": lambda m, z, b: jnp.where((z**2).sum() > 30, 1.0, 2.0) * (z**2).mean(),
    "metric": lambda m, z, b: (
        errors(z, b).mean(),
        {"error": (errors(z, b) * b["weight"]).sum() / b["weight"].sum()},
    ),
}


def parts_of(batch):
    return [jax.tree.map(lambda a, n=n: a[4 * n : 4 * n + 4], batch) for n in range(2)]


def of_parts_and_whole(loss):
    """Return the loss and metrics of two halves put together, and those of all samples."""
    values = []
    model = Net()
    for samples in (*parts_of(BATCH), BATCH):
        objective, metrics = read_loss(loss(model, samples))
        values.append([objective, *metrics.values()])
    first, second, whole = values
    added = jax.tree.map(jnp.add, first, second)
    return [float(w.mean) for w in added], [float(w.mean) for w in whole]


def check(name, losses):
    def loss(model, batch):
        return losses[name](model, model(batch["x"]), batch)

    half = parts_of(BATCH)[0]
    first, second = (trace(Net, loss, samples)[1] for samples in (half, BATCH))
    classes = dim_classes(first), dim_classes(second)
    check_mean(*classes, first.metric_names, first.kept_paths)


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_is_recognized(name):
    check(name, MEANS)


@pytest.mark.parametrize("name", OTHERS)
def test_a_loss_that_is_not_a_mean_over_samples_is_refused(name):
    output = "metric `error`" if name == "metric" else "the loss"
    with pytest.raises(UserError, match=f"{output} is not a mean over samples") as caught:
        check(name, OTHERS)
    assert "mw.Weighted(total, weight)" in caught.value.fix


class Inside(Net):
    """Computes something of the samples in the model itself."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def __call__(self, x):
        return self.compute(super().__call__(x))


def check_inside(compute, loss=lambda model, batch: (model(batch["x"]) ** 2).mean()):
    build = lambda: Inside(compute)  # noqa: E731
    first, second = (trace(build, loss, b)[1] for b in (parts_of(BATCH)[0], BATCH))
    classes = dim_classes(first), dim_classes(second)
    check_mean(*classes, first.metric_names, first.kept_paths)


def test_a_model_that_returns_the_mean_itself_is_accepted():
    check_inside(lambda z: (z**2).mean(), lambda model, batch: model(batch["x"]))
    check_inside(lambda z: z / len(z), lambda model, batch: (model(batch["x"])).sum())


@pytest.mark.parametrize(
    "compute",
    [
        lambda z: z * jnp.arange(len(z))[:, None],
        lambda z: z * len(z),
        lambda z: z - z.mean(0),
        lambda z: jnp.sin(z) if len(z) > 4 else z,
        lambda z: (
            z
            + jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(
                jax.random.split(jax.random.key(0), len(z))
            )
        ),
        lambda z: z[::-1] * z,
    ],
)
def test_a_model_that_uses_the_number_or_position_of_samples_is_refused(compute):
    with pytest.raises(UserError, match=r"mixes samples|the loss is not a mean over samples"):
        check_inside(compute)


@pytest.mark.full
@pytest.mark.parametrize("name", [*MEANS, *OTHERS])
def test_only_for_a_mean_do_the_parts_add_up_to_the_whole(name):
    function = MEANS.get(name) or OTHERS[name]
    parts, whole = of_parts_and_whole(lambda model, b: function(model, model(b["x"]), b))
    assert np.allclose(parts, whole, rtol=1e-5) == (name in MEANS)
