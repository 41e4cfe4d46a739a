"""Measures how long `meshwright plan` searches the meshes of 1024 devices.

Each measurement is a fresh process that runs the whole command: every mesh is ranked or rejected,
and the scaling curve and what would change the decision are searched as well. Importing the
command's modules is measured by itself. The fastest measurement counts; CPU time is judged, since
one process does all of it, and load on the machine changes the time by the clock.

    python benchmarks/plan_search.py
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import verdict, write_record

ROOT = Path(__file__).parents[1]
TURNS = 2

CASES = {
    "GPT-2 medium, 1024 × A100-80GB": ("model=gpt2_medium", "hardware=128x8xA100-80GB"),
    "Llama 3 8B, 1024 × H100": ("model=llama3_8b", "hardware=128x8xH100"),
    "Llama 3 70B, 1024 × A100-80GB": ("model=llama3_70b", "hardware=128x8xA100-80GB"),
    "Gemma 3 4B, 8 × H100": ("model=gemma3_4b", "hardware=8xH100"),
}
LIMITS = dict(zip(CASES, (10.0, 10.0, 15.0, 15.0), strict=True))
"""Seconds of CPU time that a search may take, without imports."""


def main() -> None:
    imports = min(run(["-c", "import meshwright.cli.plan"])[1] for _ in range(TURNS))
    print(f"imports: {imports} s of CPU", flush=True)
    cases: dict[str, dict[str, Any]] = {}
    for name, arguments in CASES.items():
        readings = [plan(arguments) for _ in range(TURNS)]
        seconds, cpu, meshes = min(readings, key=lambda reading: reading[1])
        search = round(cpu - imports, 1)
        cases[name] = {
            "meshes": meshes,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "search_cpu_seconds": search,
            "readings": readings,
        }
        print(f"{name}: {meshes} meshes, {seconds} s, {cpu} s of CPU", flush=True)
    targets = {
        f"{name}, without imports": (
            f"at most {LIMITS[name]:g} s of CPU: "
            f"{verdict(found['search_cpu_seconds'], LIMITS[name])}"
        )
        for name, found in cases.items()
    }
    figures = {"turns": TURNS, "import_cpu_seconds": imports}
    write_record("plan_search", {**figures, "cases": cases, "targets": targets})


def plan(arguments: Sequence[str]) -> tuple[float, float, int]:
    """Run the command, and return its seconds by the clock and of the CPU, and its meshes."""
    with tempfile.TemporaryFile("w+") as output:
        seconds, cpu = run(["-m", "meshwright", "plan", *arguments, "--json"], output)
        output.seek(0)
        found = json.load(output)
    return seconds, cpu, len(found["plans"]) + len(found["rejected"])


def run(arguments: Sequence[str], output: Any = subprocess.DEVNULL) -> tuple[float, float]:
    """Run Python, and return its seconds by the clock and of the CPU."""
    before, started = _cpu_seconds(), time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=output,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return round(time.perf_counter() - started, 1), round(_cpu_seconds() - before, 1)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
