"""Compiler options for GPUs: how much is sent at once, by the size of a block."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshwright.compiled.compile_program import known_options
from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.plan import Plan
from meshwright.step.assemble import assemble
from meshwright.step.compiler_options import collective_options

WIDTH = 2048
BLOCK = WIDTH * WIDTH + WIDTH
MIB = 2**20


class Blocks(nnx.Module):
    def __init__(self, width, *, rngs):
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


class Plain(nnx.Module):
    def __init__(self, width, *, rngs):
        self.first = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return self.first(x)


class Convolutions(nnx.Module):
    def __init__(self, width, *, rngs):
        self.first = nnx.Conv(1, 4, (3,), rngs=rngs)
        self.second = nnx.Conv(4, 1, (3,), rngs=rngs)
        self.head = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return self.head(self.second(self.first(x[..., None]))[..., 0])


def options(mesh, kind=Blocks, width=WIDTH, **settings):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    sharding = ShardingConfig(
        blocks=settings.pop("blocks", "unroll"), remat=settings.pop("remat", "none")
    )
    batch = solve_batch(replicas=replicas, global_batch_size=8)
    plan = Plan(mesh=mesh, batch=batch, sharding=sharding, **settings)
    shapes = {"x": np.zeros((8, width), np.float32)}
    assembled = assemble(
        lambda rngs: kind(width, rngs=rngs),
        lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optax.sgd(0.1),
        plan,
        shapes,
    )
    return collective_options(assembled.traced, plan)


def limits(mesh, **settings):
    found = options(mesh, **settings)
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return [found[f"xla_gpu_{kind}_combine_threshold_bytes"] for kind in kinds]


def test_a_block_is_reduce_scattered_at_once_and_else_sent_in_two_parts():
    assert limits({"fsdp": 8}, precision="bf16") == [
        int(BLOCK * 2 / 2 * 1.2),
        int(BLOCK * 4 * 1.2) // 8,
        int(BLOCK * 4 / 2 * 1.2),
    ]


def test_a_block_that_is_recomputed_is_reduced_at_once():
    saved, recomputed = limits({"data": 8}), limits({"data": 8}, remat="full")
    assert [b / a for a, b in zip(saved, recomputed, strict=True)] == pytest.approx([1, 1, 2])


def test_a_device_holds_less_of_a_block_with_tensor_parallelism():
    whole, half = limits({"fsdp": 4, "data": 2}), limits({"fsdp": 4, "tensor": 2})
    assert [a / b for a, b in zip(whole, half, strict=True)] == pytest.approx([2.0, 2.0, 2.0])


def test_small_blocks_are_sent_together():
    assert limits({"fsdp": 8}, width=16) == [int(4.8 * MIB), int(4.8 * MIB) // 8, int(4.8 * MIB)]


def test_rolled_blocks_carry_collectives_over():
    found = options({"fsdp": 8}, blocks="scan")
    assert found["xla_gpu_enable_pipelined_all_gather"] is True
    assert found["xla_gpu_pipeline_reduce_scatter"] == "COLLECTIVE_PIPELINING_MODE_ON"
    assert not any("threshold" in name for name in found)


def test_a_device_that_is_alone_has_nothing_to_hide():
    assert options({}) == {"xla_gpu_enable_latency_hiding_scheduler": False}
    assert known_options(options({})) == options({})


@pytest.mark.parametrize(("mesh", "kind"), [({"tensor": 8}, Blocks), ({"fsdp": 8}, Plain)])
def test_the_compiler_decides_where_no_block_is_sent(mesh, kind):
    assert options(mesh, kind) == {}


def test_what_convolutions_read_is_fenced_in():
    fence = "xla_gpu_experimental_scheduler_memory_fencing_threshold_bytes"
    assert options({"data": 8}, Convolutions, width=64) == {fence: 16 * MIB}
    assert fence not in options({"data": 8}, Blocks, width=64)


def test_only_options_that_the_compiler_knows_are_passed():
    wanted = {
        "xla_gpu_all_gather_combine_threshold_bytes": 1000,
        "xla_gpu_no_such_option": True,
        "xla_gpu_enable_latency_hiding_scheduler": "neither true nor false",
    }
    assert known_options(wanted) == {"xla_gpu_all_gather_combine_threshold_bytes": 1000}


def test_this_compiler_can_carry_collectives_over():
    found = known_options(options({"fsdp": 8}, blocks="scan", width=16))
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    assert all(any(name.endswith(kind) for name in found) for kind in kinds)
