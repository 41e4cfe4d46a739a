"""A certificate that cannot fail is worthless: broken steps are caught, and the leaf is named."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.config.batch import solve_batch
from meshwright.plan import Plan
from meshwright.step import train_step
from meshwright.verify import verify


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jax.nn.relu(self.norm(self.up(x)))))


def loss(model, batch):
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return mw.Weighted((errors * batch["weight"]).sum(), batch["weight"].sum())


def batches(step):
    random = np.random.default_rng(step)
    return {
        "x": random.normal(size=(16, 8)).astype(np.float32),
        "y": random.normal(size=(16, 4)).astype(np.float32),
        "weight": random.uniform(0.1, 2.0, size=16).astype(np.float32),
    }


def certificate(mesh, accumulation=1):
    batch = solve_batch(
        replicas=mesh.get("data", 1) * mesh.get("fsdp", 1),
        global_batch_size=16,
        gradient_accumulation_steps=accumulation,
    )
    plan = Plan(mesh=mesh, batch=batch, sharding=mw.ShardingConfig(min_shard_size=1))
    return verify(
        lambda rngs: Net(rngs),
        loss,
        plan,
        batches,
        optimizer=optax.adamw(1e-3),
        steps=2,
        devices=jax.devices()[: plan.num_devices],
    )


def failed(found):
    assert not found.equal
    return {comparison.what: comparison for comparison in found.failures()}


def test_a_right_step_is_certified_and_null_leaves_are_listed():
    found = certificate({"fsdp": 2, "tensor": 2}, accumulation=2)
    assert found.equal, [c.sentence() for c in found.failures()]
    # A bias before batch normalisation changes nothing.
    assert found.null_leaves == ["up.bias"]


def test_a_sum_instead_of_a_mean_is_caught(monkeypatch):
    right = train_step.compute_gradients

    def summed(*args, **kwargs):
        gradients = right(*args, **kwargs)
        return dataclasses.replace(gradients, values=[4 * g for g in gradients.values])

    monkeypatch.setattr(train_step, "compute_gradients", summed)
    assert "gradients" in failed(certificate({"data": 4}))


def test_one_leaf_without_its_reduction_is_caught_and_named(monkeypatch):
    right = train_step.compute_gradients

    def partial(function, params, state, batch, scale=None):
        gradients = right(function, params, state, batch, scale)
        half = [leaf[: leaf.shape[0] // 2] for leaf in batch]
        doubled = [jax.numpy.concatenate([leaf, leaf]) for leaf in half]
        local = right(function, params, state, doubled, scale)
        return dataclasses.replace(gradients, values=[*gradients.values[:-1], local.values[-1]])

    monkeypatch.setattr(train_step, "compute_gradients", partial)
    found = failed(certificate({"data": 4}))["gradients"]
    assert found.first_different == "up.kernel"
    assert found.first_difference > 1e-3


def test_a_repeated_microbatch_is_caught(monkeypatch):
    right = train_step.split_strided

    def repeated(*args):
        return [jax.numpy.concatenate([leaf[:1], leaf[:-1]]) for leaf in right(*args)]

    monkeypatch.setattr(train_step, "split_strided", repeated)
    assert "loss" in failed(certificate({"data": 2}, accumulation=4))


def test_contiguous_microbatches_are_caught(monkeypatch):
    def contiguous(batch, count, *_):
        return [leaf.reshape(count, -1, *leaf.shape[1:]) for leaf in batch]

    monkeypatch.setattr(train_step, "split_strided", contiguous)
    assert "gradients" in failed(certificate({"data": 2}, accumulation=4))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_never_equal(monkeypatch, value):
    right = train_step.compute_gradients

    def spoiled(*args, **kwargs):
        gradients = right(*args, **kwargs)
        first, *rest = gradients.values
        return dataclasses.replace(gradients, values=[first + value, *rest])

    monkeypatch.setattr(train_step, "compute_gradients", spoiled)
    assert "gradients" in failed(certificate({"data": 2}))
