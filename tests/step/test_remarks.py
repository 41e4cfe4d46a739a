"""What is said of a step before it runs."""

import jax.numpy as jnp
import pytest
from flax import nnx
from small_models import WIDTH, square_loss, vectors
from step.runs import OPTIMIZER

from meshwright.config.batch import solve_batch
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
