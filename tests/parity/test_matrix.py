"""The parity matrix: every kind of model on every kind of mesh trains like one device."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from small_models import SIZES, TASKS

from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.mesh.axes import parse_mesh
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.verify import verify

KINDS = ("gpt", "stacked_gpt", "moe", "conv", "lstm", "vae", "vit", "mlp", "linen_mlp")
MESHES = (
    "data=8",
    "fsdp=8",
    "tensor=4",
    "data=2,fsdp=4",
    "fsdp=4,tensor=2",
    "data=2,fsdp=2,tensor=2",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "accumulation": {"gradient_accumulation_steps": 4},
}
SAMPLES = 32


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; ``sharding`` says how else than by default."""

    kind: str
    mesh: str
    variant: str
    sharding: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        options = "-".join(f"{key}={value}" for key, value in self.sharding.items())
        return "-".join(filter(None, (self.kind, self.mesh, self.variant, options)))


COVERING = (
    Case("gpt", "fsdp=4,tensor=2", "bf16", {"blocks": "scan"}),
    Case("stacked_gpt", "data=2,fsdp=4", "accumulation"),
    Case("moe", "data=2,fsdp=2,tensor=2", "fp32", {"remat": "full"}),
    Case("conv", "fsdp=8", "bf16", {"zero": 2}),
    Case("lstm", "tensor=4", "accumulation"),
    Case("vae", "data=8", "fp32"),
    Case("vit", "fsdp=8", "accumulation", {"blocks": "scan", "keep_gathered": True}),
    Case("mlp", "data=2,fsdp=2,tensor=2", "accumulation", {"zero": 1}),
    Case("linen_mlp", "fsdp=4,tensor=2", "fp32", {"keep_gathered": True}),
)
"""Each kind, mesh and variant, and each way to hold weights, at least once."""

MATRIX = tuple(Case(k, m, v) for k in KINDS for m in MESHES for v in VARIANTS)


def sizes_of(kind):
    """Return small sizes, dropout switched on where there is one."""
    sizes = SIZES[kind]
    return sizes | {"dropout": 0.1} if "dropout" in sizes else sizes


def batch_of(kind, number):
    """Return the batch of an update; tokens count unequally, so that microbatches do."""
    batch = TASKS[kind].synthetic_batch(number, SAMPLES)
    if "tokens" in batch:
        samples, length = batch["tokens"].shape
        kept = np.random.default_rng(number).integers(1, length, size=(samples, 1))
        batch["mask"] = (np.arange(length - 1) < kept).astype(np.float32)
    return batch


def plan_of(case):
    mesh = parse_mesh(case.mesh)
    variant = dict(VARIANTS[case.variant])
    return Plan(
        mesh=mesh,
        batch=solve_batch(
            replicas=mesh.get("data", 1) * mesh.get("fsdp", 1),
            global_batch_size=SAMPLES,
            gradient_accumulation_steps=variant.pop("gradient_accumulation_steps", 1),
        ),
        # Small enough that most leaves of these models are divided.
        sharding=ShardingConfig(min_shard_size=64, **case.sharding),
        **variant,
    )


def certify(case):
    plan = plan_of(case)
    return verify(
        lambda rngs: build_model(case.kind, rngs=rngs, **sizes_of(case.kind)),
        TASKS[case.kind].loss,
        plan,
        lambda number: batch_of(case.kind, number),
        steps=2,
        clip_norm=1.0,
        devices=jax.devices()[: plan.num_devices],
    )
