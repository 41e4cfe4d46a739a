"""Run folders with made-up numbers, written by the trackers that write real ones."""

import io
import json
import math
from pathlib import Path

import numpy as np
from rich.console import Console

from meshwright.config.schema import TrackingConfig
from meshwright.mesh.axes import describe_sizes
from meshwright.mesh.build import build_mesh
from meshwright.mesh.svg_drawing import mesh_svg
from meshwright.pipeline.schedule.schedules import get_schedule
from meshwright.pipeline.schedule.timeline_drawing import timeline_svg
from meshwright.tracking import make_trackers

STEPS = 200
LOG_EVERY = 2
NUM_LOGGED = 1 + STEPS // LOG_EVERY
MIB = 2**20


def write_run(
    folder: Path,
    *,
    learning_rate: float = 3e-4,
    mesh: dict[str, int] | None = None,
    profiled: bool = True,
    project: str = "tiny-stories",
    finished: bool = True,
) -> Path:
    """Write a whole run and return its folder."""
    mesh = mesh or {"fsdp": 4, "tensor": 2}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(learning_rate, mesh)))
    (folder / "ledger.json").write_text(json.dumps(ledger(mesh)))
    samples = [[["<user>hi & <b>you</b>\n", False], ["hello", True]]]
    (folder / "samples.json").write_text(json.dumps(samples))
    if profiled:
        (folder / "profile.json").write_text(json.dumps(profile()))
    trackers = make_trackers(
        TrackingConfig(), folder, total_steps=STEPS, console=Console(file=io.StringIO())
    )
    trackers.start(facts(mesh, project))
    write_metrics(trackers, learning_rate)
    trackers.event("warning", 120, "input wait 34% of the step: raise data.workers", {})
    result = {
        "steps": STEPS, "first_loss": 5.6, "final_loss": 1.93, "eval_loss": 2.05,
        "seconds": 312.4, "sample": "def main():\n    return <b>0</b>\n", "stopped": "all steps",
    }  # fmt: skip
    trackers.close(result if finished else {})
    return folder


def write_metrics(trackers, learning_rate: float) -> None:
    random = np.random.default_rng(int(learning_rate * 1e6))
    for step in [1, *range(LOG_EVERY, STEPS + 1, LOG_EVERY)]:
        decay = math.exp(-step * learning_rate * 60)
        loss = 1.9 + 3.7 * decay + random.normal() * 0.06
        speed = 410 + random.normal() * 12
        values = {
            "loss": loss,
            "learning_rate": learning_rate * min(1, step / 20),
            "grad_norm": 0.4 + 2 * decay + abs(random.normal()) * 0.2,
            "samples_per_second": speed,
            "tokens_per_second": speed * 128,
            "step_seconds": 16 / speed,
            "mfu": speed / 1000,
            "memory_bytes": 38 * MIB,
            "input_wait_share": abs(random.normal()) * 0.02,
            "accuracy": 0.6 - 0.5 * decay,
        }
        trackers.log("train", step, values)
        if step % 50 == 0:
            trackers.log("eval", step, {"loss": loss + 0.12, "accuracy": 0.57 - 0.5 * decay})
            trackers.event("checkpoint", step, f"saved checkpoints/{step}", {})


def facts(mesh: dict[str, int], project: str) -> dict[str, object]:
    return {
        "project": project,
        "started": "2031-05-04T10:22:33+00:00",
        "versions": {"meshwright": "0.1.0", "jax": "0.10.2", "flax": "0.12.8"},
        "command": ["meshwright", "train", "mesh.fsdp=4", "mesh.tensor=2"],
        "devices": {"count": 8, "kind": "cpu", "platform": "cpu", "processes": 1},
        "mesh": mesh,
        "mesh_svg": mesh_svg(build_mesh(mesh)),
        "plan": describe_sizes(mesh) + ", batch 16 = 4 × 4 × 1, precision no",
        "pipeline": pipeline(mesh.get("pipe", 1)),
        "parameters": {"count": 3_456_789, "bytes": 13_827_156},
        "memory_per_device": {
            "parameters": 2 * MIB, "optimizer": 4 * MIB, "state": 0, "batch": MIB // 2,
            "temporary": 24 * MIB, "total": 30.5 * MIB,
        },
        "sharding": list(sharding()),
        "flops_per_step": 42_000_000_000,
        "peak_flops": None,
        "dataset": {"fingerprint": "9f3a77c0", "num_samples": 41_233, "description": "5.3 MB text"},
        "seed": 0,
        "global_batch_size": 16,
        "tokens_per_sample": 128,
        "remarks": ["embed.pos is whole over tensor: 128 rows"],
    }  # fmt: skip


def pipeline(stages: int) -> dict[str, object] | None:
    if stages == 1:
        return None
    parts = [{"blocks": [n], "also": [], "parameters": 788_480, "flops": 52_428_800,
              "microbatches_kept": stages - n} for n in range(stages)]  # fmt: skip
    timeline = get_schedule("zb_h1").table(8, stages).timeline()
    return {
        "schedule": "zb_h1",
        "waiting": "stages wait 11.1% of the time",
        "stages": parts,
        "timeline_svg": timeline_svg(timeline),
    }


def sharding():
    shapes = {
        "attn.q.kernel": (256, 4, 64),
        "attn.out.kernel": (4, 64, 256),
        "mlp.up.kernel": (256, 1024),
        "mlp.down.kernel": (1024, 256),
        "norm.scale": (256,),
    }
    for block in range(4):
        for name, shape in shapes.items():
            whole = len(shape) == 1
            yield {
                "path": f"blocks.{block}.{name}",
                "shape": shape,
                "dtype": "float32",
                "spec": [""] if whole else ["fsdp", "tensor", *[""] * (len(shape) - 2)],
                "bytes_per_device": math.prod(shape) * 4 // (1 if whole else 8),
                "reason": "fewer than 1024 elements"
                if whole
                else "heads over tensor, rows over fsdp",
            }


def ledger(mesh: dict[str, int]) -> dict[str, object]:
    axes = {
        axis: {
            "size": size, "sent_bytes": 1_200_000 * size, "minimum_bytes": 1_190_000 * size,
            "ratio": 1.31 if axis == "data" else 1.0084,
            "excess": ["embed: all-gather of 900,000 bytes beyond the minimum"][axis != "data" :],
            "overlapped_bytes": 300_000 * size, "overlapped": 0.25,
            "overlap": {"all-gather": {"sent_bytes": 2, "overlapped_bytes": 1, "overlapped": 0.5},
                        "reduce": {"sent_bytes": 2, "overlapped_bytes": 0, "overlapped": 0.0}},
        }
        for axis, size in mesh.items()
    }  # fmt: skip
    lines = [
        {"axes": [axis], "kind": kind, "module": f"blocks.{block}.mlp", "phase": "forward",
         "count": 2, "payload_bytes": 1000, "sent_bytes": 90_000 + block}
        for axis in mesh for kind in ("all-gather", "reduce-scatter") for block in range(4)
    ]  # fmt: skip
    exposed = {"axes": [next(iter(mesh))], "kind": "all-reduce", "modules": ["blocks.0", "embed"],
               "phase": "backward", "count": 1, "sent_bytes": 900_000}  # fmt: skip
    return {"mesh": mesh, "ratio": 1.01, "axes": axes, "lines": lines, "not_overlapped": [exposed]}


def profile() -> dict[str, object]:
    return {
        "steps": 5,
        "seconds_per_step": 0.0391,
        "shares": {"compute": 0.61, "communication": 0.22, "input_wait": 0.05, "idle": 0.12},
        "collectives": [
            {"axis": axis, "kind": kind, "module": f"blocks.{n}.mlp", "count": 2 * n + 2,
             "seconds": 0.0011 * (4 - n), "exposed_seconds": 0.0002 * n, "bytes": 262_144}
            for n in range(4) for axis, kind in (("fsdp", "all-gather"), ("tensor", "all-reduce"))
        ],
        "hidden_communication": 0.08,
        "load_balance": 1.04,
        "trace": "profile",
        "advice": ["idle 12%: a larger training.micro_batch_size keeps the devices busy"],
    }  # fmt: skip


def config(learning_rate: float, mesh: dict[str, int]) -> list[dict[str, object]]:
    rows = [
        ("model.kind", "gpt", "file model/gpt2_tiny.yaml"),
        ("model.hidden_size", 256, "file model/gpt2_tiny.yaml"),
        ("optimizer.learning_rate", learning_rate, "override optimizer.learning_rate=…"),
        ("optimizer.clip_norm", 1.0, "default"),
        ("training.steps", STEPS, "file training/default.yaml"),
        ("training.micro_batch_size", None, "default"),
        *(
            (f"mesh.{axis}", mesh.get(axis, 1), "override" if axis in mesh else "default")
            for axis in ("data", "fsdp", "tensor")
        ),
        ("sharding.rules", {}, "default"),
        ("run.seed", 0, "file run/default.yaml"),
    ]  # fmt: skip
    return [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
