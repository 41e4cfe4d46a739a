"""A small model with batch statistics, dropout and unequal weights, and its certificates."""

import jax
import numpy as np
from flax import nnx

from meshwright import ShardingConfig, Weighted
from meshwright.config.batch import solve_batch
from meshwright.plan import Plan
from meshwright.proof import verify

SAMPLES = 16


class Net(nnx.Module):
    """A bias before batch normalisation changes nothing: its true gradient is zero."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jax.nn.relu(self.norm(self.up(x)))))


class Plain(nnx.Module):
    """Neither statistics nor randomness: how samples are divided changes nothing."""

    def __init__(self, *, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def weighted_loss(model, batch):
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return Weighted((errors * batch["weight"]).sum(), batch["weight"].sum())


def batch_of(step):
    random = np.random.default_rng(step)
    return {
        "x": random.normal(size=(SAMPLES, 8)).astype(np.float32),
        "y": random.normal(size=(SAMPLES, 4)).astype(np.float32),
        "weight": random.uniform(0.1, 2.0, size=SAMPLES).astype(np.float32),
    }


def plan_of(mesh, *, accumulation=1, sync=1, precision="no", **sharding):
    batch = solve_batch(
        replicas=mesh.get("data", 1) * mesh.get("fsdp", 1),
        global_batch_size=SAMPLES,
        gradient_accumulation_steps=accumulation,
        sync_gradients_every=sync,
    )
    sharding = ShardingConfig(**{"min_shard_size": 1, **sharding})
    return Plan(mesh=mesh, batch=batch, precision=precision, sharding=sharding)


def certify(
    mesh, *, model=Net, loss=weighted_loss, batches=batch_of, steps=2, seed=0, plan=None, **options
):
    """Certify a model under a plan: `options` are those of the plan, or of `verify`."""
    known = ("optimizer", "clip_norm", "trainable")
    given = {name: options.pop(name) for name in known if name in options}
    plan = plan or plan_of(mesh, **options)
    return verify(
        lambda rngs: model(rngs=rngs),
        loss,
        plan,
        batches,
        steps=steps,
        seed=seed,
        devices=jax.devices()[: plan.num_devices],
        **given,
    )


def failures(certificate):
    """Return what did not hold, by part and quantity, such as ``float64 gradients``."""
    assert not certificate.equal
    found = {
        f"{part} {comparison.what}": comparison
        for part in ("float64", "own_precision", "as_written")
        for comparison in getattr(certificate, part)
        if not comparison.equal
    }
    assert list(found.values()) == certificate.failures()
    return found
