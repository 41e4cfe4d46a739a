"""Trains large models on one GPU, and records what it takes: settings, speed and memory.

`meshwright train` with float32 master weights, AdamW and bf16 compute, on random tokens. For each
model, settings are tried in order until one fits; those that do not are recorded with the message.

    python benchmarks/gpu_largest.py [--only gemma3_1b,gemma3_4b] [--turns 2] [--steps 5]
    python benchmarks/gpu_largest.py --only gemma3_nano --steps 2    # on a CPU, not recorded
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_peers import gpu_name
from peer_cases import CASES, Case
from peer_process import EndedEarly, Worker
from record import read_record, write_record

REMAT = "sharding.remat=full"
ROLLED = "sharding.remat=full sharding.blocks=scan"
ATTEMPTS: dict[str, list[tuple[int, str]]] = {
    "gemma3_nano": [(2, REMAT)],
    "gemma3_1b": [(16, ""), (8, ""), (4, REMAT)],
    "gemma3_4b": [(8, REMAT), (4, REMAT), (1, ROLLED)],
    "llama3_8b": [(1, ROLLED)],
}
"""Rows of a batch and settings, in the order in which they are tried."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="gemma3_1b,gemma3_4b", help=", ".join(ATTEMPTS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", "--updates", type=int, default=5, help="steps of a turn")
    options = parser.parse_args()
    # By default JAX leaves a quarter of the memory to others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    names = options.only.split(",")
    found = [row for name in names for row in attempts(name, options)]
    if not gpu_name() or "gemma3_nano" in names:
        return
    earlier = read_record("gpu_largest").get("rows", [])
    rows = [*(row for row in earlier if row["model"] not in names), *found]
    fitting = {row["model"] for row in rows if "refused" not in row}
    targets = {f"{name} trains": "met" if name in fitting else "missed"
               for name in ("gemma3_1b", "gemma3_4b")}  # fmt: skip
    write_record("gpu_largest", {"gpu": gpu_name(), "rows": rows, "targets": targets})


def attempts(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Try the settings of a model until one fits."""
    rows: list[dict[str, Any]] = []
    for count, settings in ATTEMPTS[name]:
        case = replace(CASES[name], rows=count)
        tried = {"model": name, "batch": case.batch(), "settings": settings}
        try:
            rows.append(tried | train(name, case, settings, options))
        except EndedEarly as error:
            rows.append(tried | {"refused": error.reason})
        print(json.dumps(rows[-1]), flush=True)
        if "refused" not in rows[-1]:
            break
    return rows


def train(name: str, case: Case, settings: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train for a few turns, and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        data = case.data.write(Path(folder))
        side = f"meshwright:training.global_batch_size={case.rows} {settings}"
        worker = Worker(side, name, data, options.steps)
        for _ in range(options.turns):
            worker.take_turn()
        figures = worker.figures(case, 0.0)
        worker.end()
    return figures


if __name__ == "__main__":
    main()
