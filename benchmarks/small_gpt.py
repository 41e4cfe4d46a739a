"""Assembles the step of a small GPT on a mesh, for benchmarks of compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from meshwright.config.batch import solve_batch
from meshwright.config.schema import Precision, ShardingConfig
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.step.assemble import Assembled, assemble
from meshwright.tasks import find_task


def assemble_gpt(
    mesh: dict[str, int],
    *,
    sharding: ShardingConfig | None = None,
    per_replica: int = 1,
    vocab_size: int = 1024,
    context_length: int = 128,
    precision: Precision = "no",
    clip_norm: float | None = None,
    devices: Sequence[Any] | None = None,
    **model: Any,
) -> Assembled:
    """Assemble a GPT (``gpt2_tiny`` by default) with AdamW for a mesh of these devices."""
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = Plan(
        mesh=mesh,
        batch=solve_batch(replicas=replicas, global_batch_size=per_replica * replicas),
        sharding=sharding or ShardingConfig(),
        precision=precision,
    )
    sizes = {"vocab_size": vocab_size, "context_length": context_length}
    task = find_task("language_modeling")(**sizes)
    batch = task.example_batch(plan.batch.global_batch_size)
    return assemble(
        lambda rngs: build_model("gpt", rngs=rngs, **sizes, **model),
        task.loss,
        optax.adamw(1e-3),
        plan,
        batch,
        clip_norm=clip_norm,
        devices=devices,
    )


def batch_shapes(assembled: Assembled) -> list[jax.ShapeDtypeStruct]:
    """Return the leaves of a global batch as shapes on the mesh."""
    size = assembled.plan.batch.global_batch_size
    return [
        jax.ShapeDtypeStruct(
            (size, *leaf.shape[1:]), leaf.dtype, sharding=assembled.step.shardings.batch
        )
        for leaf in assembled.traced.batch
    ]
