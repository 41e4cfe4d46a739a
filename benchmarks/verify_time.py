"""Measures how long `meshwright verify` takes, compared with an earlier commit.

Each measurement is a fresh process that runs the command. The two versions alternate, and the
fastest measurement of each counts. CPU time is judged: load on the machine changes the time by the
clock from one measurement to the next. The earlier commit
compared less: in the run's own precision one step instead of all, and no metrics.

    python benchmarks/verify_time.py [COMMIT]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import verdict, write_record

ROOT = Path(__file__).parents[1]
EARLIER = "2add2d9"
TURNS = 1
LIMIT = 0.5
"""Largest ratio of the CPU time now to that of the earlier commit."""

CASES = {
    "small GPT, fsdp=4 × tensor=2": [
        *("+experiment=quick_test", "mesh.fsdp=4", "mesh.tensor=2"),
    ],
    "small GPT, pipe=2 × fsdp=4": ["+experiment=quick_test", "mesh.pipe=2", "mesh.fsdp=4"],
    "gpt2_tiny, pipe=4 × fsdp=2": ["model=gpt2_tiny", "mesh.pipe=4", "mesh.fsdp=2"],
}


def main(earlier: str) -> None:
    readings: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "earlier"
        _git("worktree", "add", "--detach", str(old), earlier)
        try:
            for _ in range(TURNS):
                for name, arguments in CASES.items():
                    for label, tree in (("earlier", old), ("now", ROOT)):
                        reading = verify(tree, arguments, folder)
                        readings.setdefault(name, {}).setdefault(label, []).append(reading)
                        print(f"{name}, {label}: {reading[0]} s, {reading[1]} s of CPU", flush=True)
        finally:
            _git("worktree", "remove", "--force", str(old))
    cases = {name: summary(found) for name, found in readings.items()}
    targets = {
        f"{name}, CPU time": f"at most {LIMIT}: {verdict(found['cpu_ratio'], LIMIT)}"
        for name, found in cases.items()
    }
    for name, found in targets.items():
        print(f"{name}: {found}")
    figures = {"earlier": earlier, "updates": 5, "turns": TURNS}
    write_record("verify_time", {**figures, "cases": cases, "targets": targets})


def verify(tree: Path, arguments: list[str], folder: str) -> tuple[float, float]:
    """Run the command of one version, and return its seconds by the clock and of the CPU."""
    command = [sys.executable, "-m", "meshwright", "verify", "simulate=8", *arguments]
    before, started = _cpu_seconds(), time.perf_counter()
    subprocess.run(
        [*command, "--out", f"{folder}/certificate.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return round(time.perf_counter() - started, 1), round(_cpu_seconds() - before, 1)


def summary(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    clock = {label: min(seconds for seconds, _ in times) for label, times in found.items()}
    cpu = {label: min(seconds for _, seconds in times) for label, times in found.items()}
    return {
        "seconds": clock,
        "cpu_seconds": cpu,
        "ratio": round(clock["now"] / clock["earlier"], 2),
        "cpu_ratio": round(cpu["now"] / cpu["earlier"], 2),
        "readings": found,
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else EARLIER)
