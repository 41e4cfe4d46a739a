"""What is said of a step before it runs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from small_models import WIDTH, square_loss, vectors
from step.runs import OPTIMIZER

from meshwright.config.batch import solve_batch
from meshwright.errors import UserError
from meshwright.plan import Plan
from meshwright.step.assemble import assemble


class Net(nnx.Module):
    def __init__(self, layer, *, rngs):
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layer = layer(rngs)

    def __call__(self, x):
        self.calls[...] += 1
        return self.layer(self.linear(x))


def normed(rngs):
    return nnx.BatchNorm(WIDTH, rngs=rngs)


@pytest.mark.parametrize(
    ("layer", "count", "said"),
    [
        (normed, 4, ["`layer.mean` is a statistic of one microbatch at a time, and the 4"]),
        (normed, 1, []),
        (lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs), 4, []),
    ],
)
def test_statistics_of_few_samples_are_named(layer, count, said):
    batch = solve_batch(replicas=1, global_batch_size=16, gradient_accumulation_steps=count)
    plan = Plan(mesh={}, batch=batch)
    build = lambda rngs: Net(layer, rngs=rngs)  # noqa: E731
    found = assemble(build, square_loss, OPTIMIZER, plan, vectors()).remarks
    assert [remark[: len(text)] for remark, text in zip(found, said, strict=True)] == said


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Chain(nnx.Module):
    """Two blocks, on an input that may be added to what was seen before."""

    def __init__(self, remembered=0, *, rngs):
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.seen = nnx.Variable(jnp.zeros((remembered, WIDTH))) if remembered else None

    def __call__(self, x):
        if self.seen is not None:
            x = x + self.seen[...]
            self.seen[...] = jax.lax.stop_gradient(x)
        for block in self.blocks:
            x = block(x)
        return x


def remarks(loss, mesh, count, model=Chain):
    batch = solve_batch(replicas=1, global_batch_size=16, gradient_accumulation_steps=count)
    stages = {"schedule": "1f1b", "num_microbatches": count} if mesh else {}
    plan = Plan(mesh=mesh, batch=batch, **stages)
    devices = jax.devices()[: plan.num_devices]
    build = lambda rngs: model(rngs=rngs)  # noqa: E731
    return assemble(build, loss, OPTIMIZER, plan, vectors(), devices=devices).remarks


@pytest.mark.parametrize(("mesh", "count"), [({"pipe": 2}, 8), ({}, 4), ({}, 16)])
def test_a_state_with_a_row_for_each_sample_of_the_batch(mesh, count):
    # A microbatch of a single sample would be repeated for all rows.
    with pytest.raises(UserError, match="cannot be computed for a microbatch") as error:
        remarks(square_loss, mesh, count, lambda rngs: Chain(16, rngs=rngs))
    assert f"the {count} microbatches" in error.value.why
    assert "`seen` has a row for each" in error.value.why
