"""Compares the collectives of a step before and after optimization by the GPU compiler.

One GPU compiles the program for eight (`jax_mock_gpu_topology`); nothing runs. The ledger counts
reductions whose results are added together as one reduction. For each mesh, this benchmark checks
that count: in the optimized HLO the compiler has merged them, so both programs must send the same
bytes.

    XLA_FLAGS=--xla_gpu_shard_autotuning=false python benchmarks/gpu_reductions.py
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax

jax.config.update("jax_mock_gpu_topology", "1x8x1")

import optax

from meshwright.compiled.collectives import Collective, read_collectives
from meshwright.compiled.compile_program import compile_program
from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.ledgers.minimum import needed_by_stage
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.step.assemble import assemble
from meshwright.tasks import find_task

MESHES = (
    ({"data": 8}, {}, "no"),
    ({"fsdp": 8}, {}, "no"),
    ({"fsdp": 8}, {"blocks": "scan"}, "no"),
    ({"fsdp": 8}, {}, "bf16"),
    ({"fsdp": 4, "tensor": 2}, {}, "no"),
)


def main(target: Path) -> None:
    rows = [measure(*mesh) for mesh in MESHES]
    report = {
        "command": "XLA_FLAGS=--xla_gpu_shard_autotuning=false python benchmarks/gpu_reductions.py",
        "hardware": f"{jax.local_devices()[0].device_kind}, topology of 8 mocked",
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax")},
        "date": datetime.now(UTC).date().isoformat(),
        "model": "gpt2_tiny, 2 samples per replica, AdamW, clip 1.0",
        "rows": rows,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def measure(mesh: dict[str, int], sharding: dict[str, str], precision: str) -> dict[str, object]:
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    task = find_task("language_modeling")()
    plan = Plan(
        mesh=mesh,
        batch=solve_batch(replicas=replicas, global_batch_size=2 * replicas),
        sharding=ShardingConfig(**sharding),
        precision=precision,
    )
    batch = task.example_batch(plan.batch.global_batch_size)
    model = lambda rngs: build_model("gpt", rngs=rngs)  # noqa: E731
    assembled = assemble(model, task.loss, optax.adamw(1e-3), plan, batch, clip_norm=1.0)
    leaves = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=assembled.step.shardings.batch)
        for x in jax.tree.leaves(batch)
    ]
    program = compile_program(assembled.step.lower(leaves))
    row = {"mesh": mesh, "sharding": sharding, "precision": precision}
    (needs,) = needed_by_stage(assembled, None)
    row["minimum"] = round(sum(need.sent_bytes for need in needs))
    axes = dict(assembled.mesh.shape)
    for name, text in (("partitioned", program.partitioned), ("optimized", program.optimized)):
        row[name] = summary(read_collectives(text, axes))
    print(json.dumps(row), flush=True)
    return row


def summary(found: list[Collective]) -> dict[str, dict[str, int]]:
    counts: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for c in found:
        axes = " × ".join(c.axes)
        counts[f"{c.kind} over {axes}, {c.dtype}"] += c.count
        sent[axes] += round(c.sent_bytes)
    return {"count": dict(counts), "sent_bytes": dict(sent)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/gpu_reductions.json"))
