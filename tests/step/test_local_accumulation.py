"""Reducing gradients once per several microbatches: the same step, less sent."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from program.programs import quick

import meshwright as mw
from meshwright.config.batch import solve_batch
from meshwright.errors import UserError
from meshwright.ledgers import make_ledger
from meshwright.plan import Plan
from meshwright.step import step_program, train_step
from meshwright.step.assemble import assemble

random = np.random.default_rng(0)
BATCH = {
    "x": random.normal(size=(32, 8)).astype(np.float32),
    "y": random.normal(size=(32, 4)).astype(np.float32),
    "weight": random.uniform(0.1, 2.0, size=32).astype(np.float32),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jax.nn.relu(self.up(x))))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x))


def loss(model, batch):
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return mw.Weighted((errors * batch["weight"]).sum(), batch["weight"].sum())


class Depthwise(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (3,), feature_group_count=4, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.conv(self.up(x).reshape(-1, 4, 4)).reshape(-1, 16))


class Fickle(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Linear(8, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(x) if len(x) > 2 else x)


def step_for(mesh, every, model=Net, zero=1, count=4):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    batch = solve_batch(
        replicas=replicas,
        global_batch_size=32,
        gradient_accumulation_steps=count,
        sync_gradients_every=every,
    )
    sharding = mw.ShardingConfig(min_shard_size=1, zero=zero)
    plan = Plan(mesh=mesh, batch=batch, sharding=sharding)
    devices = jax.devices()[: plan.num_devices]
    return assemble(lambda rngs: model(rngs), loss, optax.sgd(0.1), plan, BATCH, devices=devices)


def gradients(assembled):
    state, batch = assembled.init(0), assembled.put_batch(BATCH)
    values = quick(lambda s, b: assembled.step.gradients(s, b).values)(state, batch)
    return [np.asarray(value) for value in values]


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}])
def test_the_gradient_is_the_same_and_less_is_sent(mesh):
    always, seldom = step_for(mesh, 1), step_for(mesh, 4)
    # Dropout and unequal weights included; the bound is float32 rounding of sums of order one.
    for a, b in zip(gradients(always), gradients(seldom), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    sent = [make_ledger(one, BATCH).axes["data"].sent_bytes for one in (always, seldom)]
    assert sent[0] == 4 * sent[1]


@pytest.mark.parametrize("model", [Net, pytest.param(Depthwise, marks=pytest.mark.full)])
def test_one_sample_on_each_device_is_a_part_of_a_microbatch_still(model):
    mesh = {"data": 4, "tensor": 2}
    always, seldom = (step_for(mesh, every, model=model, count=8) for every in (1, 8))
    for a, b in zip(gradients(always), gradients(seldom), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [4, 8])
def test_a_model_that_mixes_samples_is_refused(count):
    with pytest.raises(UserError, match="`norm` mixes samples"):
        step_for({"data": 4}, 2, model=Normed, count=count)


def test_draws_that_depend_on_the_number_of_samples_are_refused():
    with pytest.raises(UserError, match="1 times for a microbatch, 0 for one device's part"):
        step_for({"data": 4}, 2, model=Fickle)


def test_divided_gradients_are_refused():
    with pytest.raises(UserError, match=r"zero=3 shards gradients over fsdp=4"):
        step_for({"fsdp": 4}, 2, zero=3)


@pytest.fixture
def through_gloo(monkeypatch):
    """Gradients are sent as between processes on CPUs."""
    for module in (step_program, train_step):
        monkeypatch.setattr(module, "sends_through_gloo", lambda mesh: True)


def reductions(assembled):
    lowered = assembled.step.lower(assembled.put_batch(BATCH))
    return re.findall(r" = (.*?) all-reduce\(", lowered.compile().as_text())


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 4])
def test_between_processes_on_cpus_all_gradients_are_one_array(through_gloo, count):
    joined = step_for({"data": 4}, 1, count=count)
    expected = gradients(step_for({}, 1, count=count))
    for a, b in zip(expected, gradients(joined), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    # The gradients, the loss and the weights of its samples.
    numbers = sum(value.size for value in expected) + 2
    assert [kind.split("{")[0] for kind in reductions(joined)] == [f"f32[{numbers}]"]
    axis = make_ledger(joined, BATCH).axes["data"]
    assert axis.sent_bytes == count * (2 * 3 / 4 * 4 * numbers)


@pytest.mark.parametrize("model", [Normed, pytest.param(Fickle, marks=pytest.mark.full)])
def test_a_model_that_needs_all_samples_is_divided_by_the_compiler(through_gloo, model):
    divided = step_for({"data": 4}, 1, model=model, count=1)
    whole = step_for({}, 1, model=model, count=1)
    for a, b in zip(gradients(whole), gradients(divided), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_divided_weights_are_reduced_by_the_compiler(through_gloo):
    assert len(reductions(step_for({"data": 2, "fsdp": 2}, 1, count=1, zero=3))) > 1
