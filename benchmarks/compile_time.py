"""Measures how compile time depends on the number of devices: 8, 64 and 256 virtual ones.

Each measurement is a fresh process that compiles the step of `gpt2_tiny` for two meshes. The
numbers of devices alternate, and the fastest measurement of each counts: load on the machine can
only make compilation slower.

    python benchmarks/compile_time.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

from record import verdict, write_record

COUNTS = (8, 64, 256)
TURNS = 2
LIMITS = {"fsdp": 1.5, "fsdp × tensor": 3.0}
"""Largest ratio of the compile time on the most devices to that on the fewest."""


def main() -> None:
    readings: defaultdict[str, defaultdict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(TURNS):
        for count in COUNTS:
            for name, reading in in_fresh_process(count).items():
                readings[name][count].append(reading)
    meshes = {name: summary(by_count) for name, by_count in readings.items()}
    targets = {
        name: f"at most {limit}: " + verdict(meshes[name]["ratio"], limit)
        for name, limit in LIMITS.items()
    }
    for name, found in meshes.items():
        seconds = ", ".join(f"{s} s on {n}" for n, s in found["seconds"].items())
        print(f"{name}: {seconds}; ratio {found['ratio']}, {targets[name]}")
    figures = {"model": "gpt2_tiny, one row per replica, AdamW", "turns": TURNS}
    write_record("compile_time", {**figures, "meshes": meshes, "targets": targets})


def in_fresh_process(count: int) -> dict[str, Any]:
    command = [sys.executable, __file__, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(by_count: dict[int, list[Any]]) -> dict[str, Any]:
    best = {
        kind: {count: min(r[kind] for r in found) for count, found in by_count.items()}
        for kind in ("seconds", "cpu_seconds")
    }
    few, many = COUNTS[0], COUNTS[-1]
    return {
        **best,
        "ratio": round(best["seconds"][many] / best["seconds"][few], 2),
        "cpu_ratio": round(best["cpu_seconds"][many] / best["cpu_seconds"][few], 2),
        "readings": {count: [r["seconds"] for r in found] for count, found in by_count.items()},
    }


def read_times(count: int) -> dict[str, Any]:
    """Lower and compile the step for each mesh of ``count`` devices."""
    from small_gpt import assemble_gpt, batch_shapes

    from meshwright.mesh.simulate import simulate_devices

    simulate_devices(count)
    found: dict[str, Any] = {}
    for name, mesh in (
        ("fsdp", {"fsdp": count}),
        ("fsdp × tensor", {"fsdp": count // 2, "tensor": 2}),
    ):
        assembled = assemble_gpt(mesh)
        shapes = batch_shapes(assembled)
        wall, cpu = time.perf_counter(), time.process_time()
        assembled.step.lower(shapes).compile()
        found[name] = {
            "seconds": round(time.perf_counter() - wall, 2),
            "cpu_seconds": round(time.process_time() - cpu, 2),
        }
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(read_times(int(sys.argv[1]))))
    else:
        main()
