"""Measures whether the planner chooses well on one GPU.

For each model, all choices of what the backward pass computes again and of the microbatch are
measured. The planner chooses for the whole memory of the GPU, and for a part of it; its choice is
compared with the fastest one measured that needs no more.

    python benchmarks/gpu_choice.py [--keep] [--only llama] [--at-once 6]

With --keep, points that the record already has are not measured again.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optax
from gpu_peers import gpu_name
from gpu_planner import Point, build, run_all
from record import read_record, verdict, write_record

from meshwright.hardware import parse_hardware
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.search.candidates import REMATS, FixedSettings, PlanTask
from meshwright.planner.search.search import search

HARDWARE = "1xH200"
ROWS = {"medium": 32, "llama": 16}
"""Models, with the rows of a step."""
MICROBATCHES = (1, 2, 4)
SHARES = (0.9, 0.12)
"""Shares of the GPU's memory that a plan may take: the default, and 17 GB."""
WITHIN = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=ROWS, help="a single model; nothing is recorded")
    parser.add_argument("--keep", action="store_true", help="keep the points of the record")
    parser.add_argument("--at-once", type=int, default=6, help="points that compile at a time")
    options = parser.parse_args()
    models = [options.only] if options.only else list(ROWS)
    points = [
        Point(model, ROWS[model] // parts, remat, "unroll", parts)
        for model in models
        for remat in REMATS
        for parts in MICROBATCHES
    ]
    measured = recorded() if options.keep else {}
    with ThreadPoolExecutor() as pool:
        chosen = pool.submit(lambda: [choose(model, share) for model in models for share in SHARES])
        measured |= measure_all([p for p in points if p not in measured], options.at_once)
        choices = chosen.result()
    measured |= measure_all([p for _, p in choices if p not in measured], options.at_once)
    rows = [compare(share, point, measured) for share, point in choices]
    targets = {f"{row['model']}, {row['memory_share']:.0%} of memory": told(row) for row in rows}
    for name, text in targets.items():
        print(f"{name}: {text}")
    if gpu_name() and not options.only:
        found = [row for row in measured.values() if "ms" in row]
        record = {"gpu": gpu_name(), "targets": targets, "choices": rows, "measured": found}
        write_record("gpu_choice", record)


def measure_all(points: list[Point], at_once: int) -> dict[Point, dict[str, Any]]:
    """Measure points."""
    return dict(zip(points, run_all(points, at_once), strict=True))


def recorded() -> dict[Point, dict[str, Any]]:
    """Return the points of the record."""
    rows = read_record("gpu_choice").get("measured", [])
    return {Point(*(row[name] for name in Point._fields)): row for row in rows}


def choose(model: str, share: float) -> tuple[float, Point]:
    """Return what the planner chooses, with the share of memory it may take."""
    build_it, task = build(model)
    optimizer = optax.adamw(1e-4, weight_decay=0.1)
    estimator = Estimator(build_it, task.loss, optimizer, task.example_batch(8))
    hardware = parse_hardware(HARDWARE)
    fixed = FixedSettings(blocks="unroll")
    plan = search(
        estimator, PlanTask(hardware, ROWS[model], fixed=fixed, memory_share=share)
    ).best.plan
    batch = plan.batch
    return share, Point(
        model,
        batch.micro_batch_size,
        plan.sharding.remat,
        plan.sharding.blocks,
        batch.gradient_accumulation_steps,
    )


def compare(share: float, point: Point, measured: dict[Point, dict[str, Any]]) -> dict[str, Any]:
    """Compare a choice with the fastest measured point of the model that needs no more memory."""
    limit = 1e9 * share * parse_hardware(HARDWARE).chip.hbm_gb
    fitting = [
        row
        for other, row in measured.items()
        if other.model == point.model and "ms" in row and row["bytes"] <= limit
    ]
    own = measured[point]
    row: dict[str, Any] = {"model": point.model, "memory_share": share, "chosen": point._asdict()}
    if not fitting or "ms" not in own:
        return row
    best = min(fitting, key=lambda each: each["ms"])
    keys = ("rows", "remat", "microbatches", "ms", "bytes")
    return {
        **row,
        "ms": own["ms"],
        "bytes": own["bytes"],
        "fits": own["bytes"] <= limit,
        "best": {key: best[key] for key in keys},
        "slower": round(own["ms"] / best["ms"] - 1, 4),
    }


def told(row: dict[str, Any]) -> str:
    """Return what was found, in words."""
    chosen = row["chosen"]
    text = f"remat={chosen['remat']}, {chosen['microbatches']} × {chosen['rows']} rows"
    if "ms" not in row:
        return f"{text}; not measured"
    best = row["best"]
    fastest = f"remat={best['remat']}, {best['microbatches']} × {best['rows']} rows"
    fits = "fits" if row["fits"] else "does NOT fit"
    return (
        f"{text} takes {row['ms']:.1f} ms and {fits}; the fastest that fits, {fastest}, takes "
        f"{best['ms']:.1f} ms; at most {WITHIN:.0%} slower: {verdict(row['slower'], WITHIN)} "
        f"({row['slower']:+.1%})"
    )


if __name__ == "__main__":
    main()
