"""Compares the predicted state and communication of plans with what is compiled for them.

Plans of six models on many meshes are compiled for virtual CPU devices; nothing runs. State and
batch must be predicted exactly. Other memory depends on the platform, and is compared for GPUs
(gpu_memory).

    python benchmarks/planner_accuracy.py [--compiled FILE] [--models NAME …]

With --compiled, what the compiler says is kept in a file and read from it the next time. With
--models, only some models are compared, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record import verdict, write_record

from meshwright.mesh.simulate import simulate_devices

DEVICES = 8
SENT = 0.01
"""The largest median error of what is sent."""


@dataclass(frozen=True)
class Case:
    """A model with its task, and samples per device and microbatch."""

    kind: str
    sizes: Mapping[str, Any]
    task: str
    task_sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: int = 4


@dataclass(frozen=True)
class Setting:
    """How a model is trained."""

    mesh: Mapping[str, int]
    remat: str = "none"
    accumulation: int = 1

    def __str__(self) -> str:
        mesh = " × ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        more = [f"remat={self.remat}"] if self.remat != "none" else []
        more += [f"{self.accumulation} microbatches"] if self.accumulation > 1 else []
        return ", ".join([mesh, *more])


WORDS = {"vocab_size": 512, "context_length": 128}
IMAGES = {"image_size": 32, "channels_in": 3}
CASES = {
    "GPT-2": Case(
        "gpt",
        {**WORDS, "num_blocks": 8, "hidden_size": 128, "num_heads": 4},
        "language_modeling",
        WORDS,
    ),
    "Gemma 3": Case(
        "gemma3",
        {
            **WORDS,
            "num_blocks": 6,
            "hidden_size": 128,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "mlp_size": 384,
            "sliding_window": 32,
            "global_every": 3,
        },
        "language_modeling",
        WORDS,
    ),
    "ViT": Case(
        "vit",
        {
            **IMAGES,
            "patch_size": 4,
            "num_blocks": 8,
            "hidden_size": 128,
            "num_heads": 4,
            "num_classes": 100,
        },
        "classification",
        {"input_shape": (32, 32, 3), "num_classes": 100},
        rows=8,
    ),
    "ResNet": Case(
        "resnet",
        {"channels_in": 3, "depths": (1, 1, 1), "width": 32, "num_classes": 100},
        "classification",
        {"input_shape": (64, 64, 3), "num_classes": 100},
        rows=8,
    ),
    "VAE": Case("vae", {"hidden_size": 512}, "reconstruction", {}, rows=64),
    "MLP": Case("mlp", {"widths": (784, 1024, 1024, 10)}, "classification", {}, rows=64),
}
BLOCKS = (
    Setting({}),
    Setting({}, "full"),
    Setting({"data": 8}),
    Setting({"fsdp": 8}),
    Setting({"fsdp": 8}, "dots"),
    Setting({"data": 4, "tensor": 2}),
    Setting({"fsdp": 4, "tensor": 2}, "full"),
    Setting({"data": 2, "fsdp": 4}, "none", 2),
    Setting({"fsdp": 2, "tensor": 4}),
    Setting({"pipe": 2, "data": 4}, "none", 8),
    Setting({"pipe": 2, "fsdp": 2, "tensor": 2}, "full", 8),
    Setting({"data": 8}, "dots", 4),
)
FLAT = tuple(
    Setting(mesh, "none", accumulation)
    for mesh in ({}, {"data": 2}, {"data": 4}, {"data": 8})
    for accumulation in (1, 2, 4)
)
"""For models without repeated blocks."""
REPEATED = ("GPT-2", "Gemma 3", "ViT")
"""Models of equal blocks, which stages divide and scans roll."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", type=Path)
    parser.add_argument("--models", nargs="*", choices=CASES)
    arguments = parser.parse_args()
    kept: Path | None = arguments.compiled
    chosen: list[str] = arguments.models or list(CASES)
    simulate_devices(DEVICES)
    compiled = json.loads(kept.read_text()) if kept and kept.exists() else {}
    rows: list[dict[str, Any]] = []
    for name in chosen:
        workload = Workload(CASES[name])
        for setting in BLOCKS if name in REPEATED else FLAT:
            key = f"{name}: {setting}"
            if key not in compiled:
                compiled[key] = workload.compile(setting)
                if kept:
                    kept.write_text(json.dumps(compiled, indent=1))
            row = {"model": name, "setting": str(setting), **compiled[key]}
            rows.append({**row, **compare(workload.predict(setting), compiled[key])})
            print(line(rows[-1]), flush=True)
    figures = {"model": "small models, float32, AdamW, rolled blocks", "rows": rows}
    targets = summarize(rows)
    for what, found in targets.items():
        print(f"{what}: {found}")
    if not arguments.models:
        write_record("planner_accuracy", {**figures, "errors": errors(rows), "targets": targets})


class Workload:
    """Compiles and predicts the plans of one model."""

    def __init__(self, case: Case) -> None:
        import optax

        from meshwright.models import build_model
        from meshwright.tasks import find_task

        self.case, self.task = case, find_task(case.task)(**case.task_sizes)
        self.optimizer = optax.adamw(1e-3)
        self.model = lambda rngs: build_model(case.kind, rngs=rngs, **case.sizes)
        self._estimator: Any = None

    def plan(self, setting: Setting) -> Any:
        """Return the plan of a setting."""
        from meshwright.config.batch import solve_batch
        from meshwright.config.schema import ShardingConfig
        from meshwright.plan import Plan

        mesh = dict(setting.mesh)
        batch = solve_batch(
            replicas=mesh.get("data", 1) * mesh.get("fsdp", 1),
            micro_batch_size=self.case.rows,
            gradient_accumulation_steps=setting.accumulation,
        )
        staged = {"schedule": "1f1b", "num_microbatches": setting.accumulation}
        return Plan(
            mesh=mesh,
            batch=batch,
            sharding=ShardingConfig(remat=setting.remat, blocks="scan"),
            **(staged if mesh.get("pipe", 1) > 1 else {}),
        )

    def compile(self, setting: Setting) -> dict[str, Any]:
        """Return what the compiler says about a plan."""
        import jax

        from meshwright.planner.rehearse.rehearsal import rehearse
        from meshwright.step.assemble import assemble

        plan = self.plan(setting)
        assembled = assemble(
            self.model,
            self.task.loss,
            self.optimizer,
            plan,
            self.task.example_batch(plan.batch.global_batch_size),
            clip_norm=1.0,
            devices=jax.devices()[: plan.num_devices],
            guarded=True,
        )
        found = rehearse(assembled)
        return {
            "state_bytes": found.state,
            "batch_bytes": found.batch,
            "sent_bytes": {axis: own.sent_bytes for axis, own in found.ledger.axes.items()},
            "compile_seconds": found.compile_seconds,
        }

    def predict(self, setting: Setting) -> dict[str, Any]:
        """Return what the planner predicts for a plan."""
        from meshwright.hardware import Hardware, chip_by_name
        from meshwright.planner.estimate.estimator import Estimator

        if self._estimator is None:
            batch = self.task.example_batch(1)
            self._estimator = Estimator(self.model, self.task.loss, self.optimizer, batch)
        plan = self.plan(setting)
        hardware = Hardware(chip=chip_by_name("CPU"), count=plan.num_devices)
        found = self._estimator.estimate(plan, hardware)
        return {
            "predicted_state_bytes": found.memory.state,
            "predicted_batch_bytes": found.memory.batch,
            "predicted_sent_bytes": {
                axis: traffic.sent_bytes for axis, traffic in found.time.traffic.items()
            },
        }


def compare(predicted: dict[str, Any], compiled: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction with its errors, as shares of what the compiler says."""
    guess = predicted["predicted_sent_bytes"]
    return {
        **predicted,
        "exact": all(
            predicted[f"predicted_{name}"] == compiled[name]
            for name in ("state_bytes", "batch_bytes")
        ),
        "sent_errors": {
            axis: round(guess.get(axis, 0.0) / sent - 1, 4)
            for axis, sent in compiled["sent_bytes"].items()
        },
    }


def line(row: Mapping[str, Any]) -> str:
    """Return a row for reading."""
    exact = "exact" if row["exact"] else "STATE OR BATCH DIFFERS"
    sent = ", ".join(f"{axis} {error:+.1%}" for axis, error in row["sent_errors"].items())
    return f"{row['model']:8} {row['setting']:60} {exact}; sent: {sent or 'nothing'}"


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the errors of what is sent over each axis and over all, without their signs."""
    axes: dict[str, list[float]] = {}
    for row in rows:
        for axis, error in row["sent_errors"].items():
            axes.setdefault(axis, []).append(abs(error))
    groups = axes | {"all": [error for own in axes.values() for error in own]}
    return {
        name: {
            "plans": len(own),
            "median": round(statistics.median(own), 4),
            "worst": round(max(own), 4),
        }
        for name, own in groups.items()
        if own
    }


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return whether the targets are met."""
    exact = sum(row["exact"] for row in rows)
    targets = {
        "state and batch": f"exact in {exact} of {len(rows)} plans: {verdict(len(rows) - exact, 0)}"
    }
    if sent := errors(rows).get("all"):
        median = sent["median"]
        targets["median error of what is sent"] = (
            f"at most {SENT:.0%}: {verdict(median, SENT)} ({median:.1%})"
        )
    return targets


if __name__ == "__main__":
    main()
