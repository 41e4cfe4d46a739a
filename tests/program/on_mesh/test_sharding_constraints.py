"""Activations that pass from module to module stay divided by sample, wherever they pass."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from program.programs import equations, modules_by_primitive, trace
from small_models import (
    LENGTH,
    SAMPLES,
    WIDTH,
    Odd,
    Residuals,
    builder,
    odd_batch,
    odd_loss,
    square_loss,
    task_batch,
    vectors,
)

from meshwright.config.schema import ShardingConfig
from meshwright.sharding.decide import decide

pytestmark = pytest.mark.quick


def constraints(build, loss, batch, sizes, *, rolled=False, compute=None):
    """Return (shape, spec) of every constrained variable, and the program."""
    _, traced = trace(build, loss, batch, compute, rolled=rolled)
    found = decide(traced, sizes, ShardingConfig(min_shard_size=0)).activations
    return traced, found


def test_what_leaves_a_module_is_pinned_by_sample():
    traced, found = constraints(Residuals, square_loss, vectors(), {"data": 2, "fsdp": 4})
    assert {v.aval.shape[0] for v in found} == {SAMPLES}
    assert set(found.values()) == {PartitionSpec(("data", "fsdp"), None)}
    constrained = [
        eqn.primitive.name
        for eqn, _ in equations(traced.closed.jaxpr)
        if found.keys() & {*eqn.outvars}
    ]
    # Of each block: both layers' results, tanh between them, and the residual sum.
    assert sorted(constrained) == sorted(2 * ["add", "tanh", "dot_general", "add"])


def test_dims_on_the_tensor_axis_are_pinned_there():
    _, found = constraints(builder("gpt"), *task_batch("gpt"), {"fsdp": 2, "tensor": 4})
    specs = {(v.aval.shape, spec) for v, spec in found.items()}
    wide = (SAMPLES, LENGTH, 4 * WIDTH)
    assert (wide, PartitionSpec("fsdp", None, "tensor")) in specs
    residual = {spec for shape, spec in specs if shape == (SAMPLES, LENGTH, WIDTH)}
    assert PartitionSpec("fsdp", None, None) in residual
    assert "tensor" not in str({s for shape, s in specs if shape == (SAMPLES, LENGTH)})


@pytest.mark.parametrize("kind", ["stacked_gpt", "lstm"])
def test_what_crosses_modules_inside_a_scan_is_pinned(kind):
    traced, found = constraints(builder(kind), *task_batch(kind), {"data": 8})
    inside = {
        variable
        for eqn, _ in equations(traced.closed.jaxpr)
        if eqn.primitive.name == "scan"
        for inner in eqn.params["jaxpr"].jaxpr.eqns
        for variable in inner.outvars
    }
    assert inside & found.keys()


def test_rolled_blocks_are_pinned_inside_their_scan():
    traced, found = constraints(builder("gpt"), *task_batch("gpt"), {"data": 8}, rolled=True)
    scan = next(e for e in traced.closed.jaxpr.eqns if e.primitive.name == "scan")
    body = scan.params["jaxpr"].jaxpr
    assert found.keys() & {v for e in body.eqns for v in e.outvars}
    assert "scan" in modules_by_primitive(traced.closed)


def test_weights_states_and_samples_that_do_not_divide_are_left_alone():
    class Mixed(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            penalty = self.norm(self.linear.kernel[...]).sum()
            return self.norm(self.linear(x[:6])).sum() + penalty

    def loss(model, batch):
        return model(batch["x"]) + jnp.mean(batch["y"])

    _, found = constraints(Mixed, loss, vectors(8), {"data": 4})
    assert all(v.aval.shape[0] == 8 for v in found)


def test_lookups_and_several_outputs_are_pinned():
    _, found = constraints(Odd, odd_loss, odd_batch(), {"data": 2, "fsdp": 4})
    shapes = {v.aval.shape for v in found}
    assert {(SAMPLES, 6, 32), (SAMPLES, 6, 101)} <= shapes
    assert all(np.prod(v.aval.shape) > 1 for v in found)
