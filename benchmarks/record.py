"""Writes a benchmark's results with the machine, versions, date and command that produced them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from math import comb
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_record(name: str, figures: dict[str, Any], *, note: str = "") -> None:
    """Write NAME.json to benchmarks/results, or to the folder $BENCHMARK_RESULTS.

    Args:
        name: the benchmark, which is the script that runs.
        figures: what it found.
        note: versions of other packages that matter, in words.
    """
    record = {
        "command": " ".join(["python", f"benchmarks/{name}.py", *map(_without_path, sys.argv[1:])]),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("jax", "jaxlib", "flax", "optax")},
            **({"note": note} if note else {}),
        },
        "date": datetime.now(UTC).date().isoformat(),
        **figures,
    }
    folder = Path(os.environ.get("BENCHMARK_RESULTS", RESULTS))
    folder.mkdir(exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n")


def read_record(name: str) -> dict[str, Any]:
    """Return the last record of a benchmark; empty if there is none."""
    folders = (Path(os.environ.get("BENCHMARK_RESULTS", RESULTS)), RESULTS)
    found = [path for folder in folders if (path := folder / f"{name}.json").exists()]
    return json.loads(found[0].read_text()) if found else {}


def hardware() -> dict[str, Any]:
    """Return the CPU model, the number of cores and the load average."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95% confidence interval, without assuming a distribution."""
    ordered = sorted(values)
    count = len(ordered)
    below, rank = 0.0, 0
    # The rank-th smallest value exceeds the true median with the chance of `below`.
    while (below := below + comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    rank = max(rank, 1)
    return statistics.median(ordered), ordered[rank - 1], ordered[count - rank]


def verdict(value: float, limit: float, *, at_most: bool = True) -> str:
    """Return "met" if a figure is within its limit, else "missed"."""
    within = value <= limit if at_most else value >= limit
    return "met" if within else "missed"


def _without_path(argument: str) -> str:
    """Return an argument; PATH for one that means something on this machine only."""
    return "PATH" if Path(argument).is_absolute() else argument


def _cpu_model() -> str:
    try:
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in listing.splitlines() if ":" in line)
    return fields.get("Model name", platform.machine()).strip()
