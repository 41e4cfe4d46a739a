"""Blocks that run one by one: made from the loop over them, and traced one by one."""

import jax
import pytest
from flax import nnx

from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.mesh.build import build_mesh
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.planner.workload.gradient_program import (
    SAMPLES,
    Variant,
    schedule_gradients,
    trace_gradients,
)
from meshwright.planner.workload.in_memory import peak_of
from meshwright.planner.workload.sizes import DeviceSizes
from meshwright.program.trace.build_model import describe_model
from meshwright.sharding.decide import dim_classes
from meshwright.step.step_program import step_program
from meshwright.tasks import find_task

WORDS = {"vocab_size": 512, "context_length": 64}
TRANSFORMER = {"num_blocks": 4, "hidden_size": 64, "num_heads": 4}
KINDS = {
    "gpt": (WORDS | TRANSFORMER, "language_modeling", WORDS),
    "gemma3": (
        WORDS | TRANSFORMER | {"num_kv_heads": 2, "head_dim": 16, "mlp_size": 128},
        "language_modeling",
        WORDS,
    ),
    "vit": (
        {"image_size": 32, "patch_size": 8, "num_classes": 10, "channels_in": 3} | TRANSFORMER,
        "classification",
        {"input_shape": (32, 32, 3), "num_classes": 10},
    ),
}


def traced_as(blocks, kind, precision):
    sizes, task_kind, task_sizes = KINDS[kind]
    task = find_task(task_kind)(**task_sizes)
    plan = Plan(
        mesh={},
        batch=solve_batch(replicas=1, global_batch_size=SAMPLES),
        sharding=ShardingConfig(blocks=blocks),
        precision=precision,
    )
    leaves = describe_model(lambda rngs: build_model(kind, rngs=rngs, **sizes), nnx.Param)
    return step_program(task.loss, leaves, task.example_batch(SAMPLES), plan).traced


def needs(program):
    """Return the bytes at the peak, the operations, and the bytes that are moved."""
    sizes = DeviceSizes(4.0, program.classes.batch)
    works = program.work.on(sizes)
    assert not (works.in_loop & (works.kind == "product")).any()
    flops, moved = ((works.times * each).sum() for each in (works.flops, works.nbytes))
    return peak_of(program.timeline, sizes).nbytes, flops, moved


@pytest.mark.parametrize(
    ("kind", "precision", "remat"),
    [
        pytest.param("gpt", "bf16", "none", marks=pytest.mark.full),
        pytest.param("gpt", "bf16", "dots", marks=pytest.mark.full),
        pytest.param("gpt", "no", "full", marks=pytest.mark.full),
        pytest.param("vit", "bf16", "none", marks=pytest.mark.full),
        pytest.param("vit", "bf16", "full", marks=pytest.mark.full),
        # An iteration of its loop has two blocks, which are computed again together.
        ("gemma3", "bf16", "none"),
    ],
)
def test_they_need_what_a_program_without_loops_needs(kind, precision, remat):
    variant = Variant(remat, gathers=False, rows=True, kernels="auto", platform="gpu")
    mesh = build_mesh({}, jax.devices()[:1])
    found = []
    for blocks in ("unroll", "scan"):
        loss = traced_as(blocks, kind, precision)
        traced = trace_gradients(loss, dim_classes(loss), mesh, variant)
        found.append(needs(schedule_gradients(traced, "gpu", unrolled=blocks == "scan")))
    own, made = found
    # Of what is computed again, a program may leave out a product that another one keeps.
    again = 0.0 if remat == "none" else 0.05
    assert made[1] == pytest.approx(own[1], rel=again), "operations"
    # Within what predictions are off anyway: 10% of the memory, and 8% of the time.
    assert made[0] == pytest.approx(own[0], rel=0.05), "memory"
    assert made[2] == pytest.approx(own[2], rel=0.08), "traffic"
