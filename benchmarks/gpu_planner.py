"""Compares predicted with measured memory and time of steps on one GPU.

Each point is a model, rows of a batch, what the backward pass recomputes, whether blocks are
rolled, and microbatches. The times of kernels (`KERNEL_TIMES` in planner/workload/gpu_rules) were
fitted to the points marked `fitted`; the others were not looked at before.

A step is timed after seconds at full load, with random samples and weights: a GPU that has just
begun, or that multiplies zeros, is below its limit of power, and up to 15% faster.

    python benchmarks/gpu_planner.py [--only llama] [--at-once 6]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpu_peers import gpu_name

MEMORY, TIME_MEDIAN, TIME_WORST = 0.10, 0.08, 0.20
"""The errors that are asked for, at most."""
WARM_SECONDS, MEASURED_SECONDS = 6.0, 8.0
"""How long a step runs before it is timed, and while it is."""
COMPILED = "compiled"
"""What a process prints when it is ready to run."""


class Point(NamedTuple):
    """A plan for one GPU."""

    model: str
    rows: int
    remat: str
    blocks: str
    microbatches: int
    fitted: bool = False


POINTS = (
    Point("gpt2", 32, "none", "unroll", 1, fitted=True),
    Point("gpt2", 16, "dots", "unroll", 1, fitted=True),
    Point("gpt2", 32, "full", "unroll", 1, fitted=True),
    Point("gpt2", 8, "none", "scan", 1, fitted=True),
    Point("gpt2", 8, "none", "unroll", 4, fitted=True),
    Point("medium", 16, "none", "unroll", 1, fitted=True),
    Point("medium", 16, "full", "scan", 1, fitted=True),
    Point("medium", 8, "dots", "unroll", 1, fitted=True),
    Point("small", 64, "none", "unroll", 1, fitted=True),
    Point("small", 32, "none", "scan", 1, fitted=True),
    Point("llama", 4, "none", "unroll", 1, fitted=True),
    Point("llama", 4, "full", "unroll", 1, fitted=True),
    Point("llama", 8, "none", "scan", 1, fitted=True),
    Point("gpt2", 64, "none", "unroll", 1),
    Point("gpt2", 24, "full", "scan", 1),
    Point("gpt2", 4, "dots", "unroll", 8),
    Point("medium", 32, "dots", "unroll", 1),
    Point("llama", 8, "dots", "unroll", 2),
    Point("gemma", 4, "none", "unroll", 1),
    Point("gemma", 8, "full", "scan", 1),
    Point("vit", 256, "none", "unroll", 1),
    Point("vit", 128, "dots", "unroll", 1),
    Point("resnet", 128, "none", "unroll", 1, fitted=True),
    Point("resnet", 256, "none", "unroll", 1),
    Point("wide_resnet", 64, "none", "unroll", 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models, separated by commas")
    parser.add_argument("--at-once", type=int, default=6, help="points that compile at a time")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point is not None:
        print(json.dumps(measure(Point(*options.point))))
        return
    chosen = [p for p in POINTS if not options.only or p.model in options.only]
    rows = run_all(chosen, options.at_once)
    if gpu_name() and not options.only:
        save(rows)


def run_all(points: Sequence[Point], at_once: int) -> list[dict[str, Any]]:
    """Run points in processes of their own: compiling together, running one at a time.

    What fails, such as for lack of memory beside the others, is tried again alone.
    """
    found = _run_beside(points, at_once)
    for point in [point for point, row in found.items() if "failed" in row]:
        if at_once > 1:
            found |= _run_beside([point], 1)
    return [found[point] for point in points]


def _run_beside(points: Sequence[Point], at_once: int) -> dict[Point, dict[str, Any]]:
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found: dict[Point, dict[str, Any]] = {}
    for first in range(0, len(points), at_once):
        running = {point: _Compiling(point, env) for point in points[first : first + at_once]}
        # Compilers time kernels on the GPU, so nothing runs before all of them are done.
        for process in running.values():
            process.wait()
        for point, process in running.items():
            found[point] = process.run()
            print(line(found[point]), flush=True)
    return found


class _Compiling:
    """A process that compiles a point, and runs it when asked."""

    def __init__(self, point: Point, env: dict[str, str]) -> None:
        self._point, self._errors = point, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._output = ""
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--point", json.dumps(point)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env,
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until it has compiled, or ended."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.strip() == COMPILED:
                return
            self._output = text

    def run(self) -> dict[str, Any]:
        """Run it, and return the figures of the point."""
        out, _ = self._process.communicate("\n")
        last = (self._output + out).strip().splitlines()[-1:]
        if last:
            return json.loads(last[0])
        self._errors.seek(0)
        error = (self._errors.read().strip().splitlines() or ["no output"])[-1]
        return {**self._point._asdict(), "failed": error[:300]}


class Planned(NamedTuple):
    """What a point trains, and how."""

    model: Any
    task: Any
    optimizer: Any
    plan: Any

    def estimator(self) -> Any:
        """Return what estimates plans for the model."""
        from meshwright.planner.estimate.estimator import Estimator

        batch = self.task.example_batch(8)
        return Estimator(self.model, self.task.loss, self.optimizer, batch)


def planned(point: Point) -> Planned:
    """Return the model and the plan of a point."""
    import optax

    from meshwright.config.batch import solve_batch
    from meshwright.config.schema import ShardingConfig
    from meshwright.plan import Plan

    sharding = ShardingConfig.model_validate({"blocks": point.blocks, "remat": point.remat})
    batch = solve_batch(
        replicas=1, micro_batch_size=point.rows, gradient_accumulation_steps=point.microbatches
    )
    plan = Plan(mesh={}, batch=batch, sharding=sharding, precision="bf16")
    return Planned(*build(point.model), optax.adamw(1e-4, weight_decay=0.1), plan)


def measure(point: Point) -> dict[str, Any]:
    """Predict, compile and run one point."""
    import jax

    from meshwright.compiled.memory import memory_of
    from meshwright.hardware import detect, parse_hardware
    from meshwright.planner.fit.fit_check import batch_shapes
    from meshwright.step.assemble import assemble

    whole = planned(point)
    model, task, optimizer, plan = whole
    hardware = detect(jax.devices()[:1])
    if hardware is None or hardware.chip.platform == "cpu":
        hardware = parse_hardware("1xH200")
    started = time.perf_counter()
    estimate = whole.estimator().estimate(plan, hardware)
    row: dict[str, Any] = {
        **point._asdict(),
        "predicted_bytes": estimate.memory.compiled,
        "predicted_ms": 1e3 * estimate.time.step,
        "estimate_seconds": time.perf_counter() - started,
    }
    if not gpu_name():
        return row
    samples = task.synthetic_batch(0, plan.batch.global_batch_size)
    assembled = assemble(model, task.loss, optimizer, plan, samples, clip_norm=1.0, guarded=True)
    compiled = assembled.step.lower(batch_shapes(assembled)).compile()
    memory = memory_of(compiled)
    batches = [task.synthetic_batch(n, plan.batch.global_batch_size) for n in range(4)]
    row |= {"bytes": memory.total, "state_bytes": memory.argument}
    row["ms"] = run(assembled, compiled, batches)
    row["memory_error"] = row["predicted_bytes"] / row["bytes"] - 1
    row["time_error"] = row["predicted_ms"] / row["ms"] - 1
    return row


def run(
    assembled: Any,
    compiled: Any,
    batches: Sequence[Any],
    warm: float = WARM_SECONDS,
    measured: float = MEASURED_SECONDS,
) -> float:
    """Return the milliseconds of a step in a run that lasts, while no other point runs."""
    import jax

    state = assembled.init(seed=0)
    placed = [assembled.put_batch(batch) for batch in batches]
    jax.block_until_ready((state, placed))
    print(COMPILED, flush=True)
    sys.stdin.readline()
    taken: list[float] = []
    begun = before = time.perf_counter()
    while before < begun + warm + measured:
        for batch in placed:
            state, _ = compiled(state, batch)
        jax.block_until_ready(state)
        now = time.perf_counter()
        if before > begun + warm or not taken:
            taken.append((now - before) / len(placed))
        before = now
    # The first turn counts only if there is no other.
    return 1e3 * statistics.median(taken[1:] or taken)


def build(name: str) -> tuple[Any, Any]:
    """Return what builds a model, and its task."""
    from meshwright.models import build_model
    from meshwright.tasks import find_task

    if name in CLASSIFIERS:
        kind, sizes = CLASSIFIERS[name]
        task = find_task("classification")(
            input_name="image", input_shape=(224, 224, 3), num_classes=1000
        )
        return (lambda rngs: build_model(kind, rngs=rngs, num_classes=1000, **sizes)), task
    kind, sizes = DECODERS[name]
    task = find_task("language_modeling")(
        vocab_size=sizes["vocab_size"], context_length=sizes["context_length"]
    )
    return (lambda rngs: build_model(kind, rngs=rngs, **sizes)), task


CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": (
        "vit",
        {"image_size": 224, "patch_size": 16, "channels_in": 3, "num_blocks": 12,
         "hidden_size": 768, "num_heads": 12, "mlp_size": 3072},
    ),
    "resnet": ("resnet", {}),
    "wide_resnet": ("resnet", {"depths": (2, 2, 2, 2), "width": 128}),
}  # fmt: skip
_GPT = {"vocab_size": 50304, "context_length": 1024, "dropout": 0.0}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt", {**_GPT, "num_blocks": 12, "hidden_size": 768, "num_heads": 12}),
    "medium": ("gpt", {**_GPT, "num_blocks": 24, "hidden_size": 1024, "num_heads": 16}),
    "small": ("gpt", {**_GPT, "num_blocks": 8, "hidden_size": 512, "num_heads": 8}),
    "llama": (
        "llama3",
        {"vocab_size": 32000, "context_length": 2048, "num_blocks": 8, "hidden_size": 2048,
         "num_heads": 32, "num_kv_heads": 8, "mlp_size": 8192},
    ),
    "gemma": (
        "gemma3",
        {"vocab_size": 262144, "context_length": 2048, "num_blocks": 12, "hidden_size": 1152,
         "num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "mlp_size": 6912,
         "sliding_window": 512, "global_every": 6},
    ),
}  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    name = f"{row['model']} {row['rows']} {row['remat']} {row['blocks']} ×{row['microbatches']}"
    if "ms" not in row:
        return f"{name:32} {row.get('failed', 'predicted only')}"
    return (
        f"{name:32} {row['predicted_bytes'] / 1e9:6.2f} of {row['bytes'] / 1e9:6.2f} GB "
        f"({row['memory_error']:+.1%})  {row['predicted_ms']:6.1f} of {row['ms']:6.1f} ms "
        f"({row['time_error']:+.1%}){'' if row['fitted'] else '  not fitted'}"
    )


def save(rows: list[dict[str, Any]]) -> None:
    """Write the record."""
    from record import verdict, write_record

    measured = [row for row in rows if "ms" in row]
    new = [row for row in measured if not row["fitted"]]
    memory = max(abs(row["memory_error"]) for row in measured)
    errors = [abs(row["time_error"]) for row in measured]
    median, worst = statistics.median(errors), max(errors)
    targets = {
        "memory: worst error at most 10%": f"{verdict(memory, MEMORY)} ({memory:.1%})",
        "time: median error at most 8%": f"{verdict(median, TIME_MEDIAN)} ({median:.1%})",
        "time: worst error at most 20%": f"{verdict(worst, TIME_WORST)} ({worst:.1%})",
    }
    if new:
        fresh = statistics.median(abs(row["time_error"]) for row in new)
        targets["time: median error of points that were not fitted at most 8%"] = (
            f"{verdict(fresh, TIME_MEDIAN)} ({fresh:.1%})"
        )
    write_record("gpu_planner", {"gpu": gpu_name(), "rows": rows, "targets": targets})


if __name__ == "__main__":
    main()
