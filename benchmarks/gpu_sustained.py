"""Compares predicted with measured times of ten steps on one GPU, in runs that last.

The points and the way they are measured are those of gpu_planner.py, whose 25 points take longer.

    python benchmarks/gpu_sustained.py [--at-once 5]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from gpu_peers import gpu_name
from gpu_planner import TIME_MEDIAN, TIME_WORST, Point, run_all
from record import verdict, write_record

POINTS = (
    Point("gpt2", 32, "none", "unroll", 1),
    Point("gpt2", 64, "none", "unroll", 1),
    Point("gpt2", 24, "full", "scan", 1),
    Point("medium", 16, "none", "unroll", 1),
    Point("medium", 32, "dots", "unroll", 1),
    Point("llama", 4, "none", "unroll", 1),
    Point("llama", 8, "dots", "unroll", 2),
    Point("gemma", 4, "none", "unroll", 1),
    Point("gemma", 8, "full", "scan", 1),
    Point("vit", 256, "none", "unroll", 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=5, help="points that compile at a time")
    rows = run_all(POINTS, parser.parse_args().at_once)
    measured = [row for row in rows if "ms" in row]
    if gpu_name() and measured:
        write_record(
            "gpu_sustained", {"gpu": gpu_name(), "rows": rows, "targets": judged(measured)}
        )


def judged(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return whether the targets are met."""
    errors = [abs(row["time_error"]) for row in rows]
    median, worst = statistics.median(errors), max(errors)
    return {
        "time: median error at most 8%": f"{verdict(median, TIME_MEDIAN)} ({median:.1%})",
        "time: worst error at most 20%": f"{verdict(worst, TIME_WORST)} ({worst:.1%})",
    }


if __name__ == "__main__":
    main()
