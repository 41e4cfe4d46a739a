"""Compares training on one GPU with Hugging Face transformers and torch.compile.

Both sides train the same model on the same data with AdamW, clipping at norm 1.0, float32
master weights and bf16 compute. Each runs in a process of its own; they take turns of 20 seconds.
The first turn of a side warms up, and three more are measured: a minute at the card's power limit.
Turns of a second would measure a cooler card at higher clocks. Tokens and pixels are random and
different in every step: a batch that is repeated is soon learned, and gradients near zero need
less power. Clocks, power and joules are recorded.

    python benchmarks/gpu_peers.py [--only gpt2,gpt2_medium] [--turns 4] [--seconds 20]
    python benchmarks/gpu_peers.py --only vit_b,resnet50
    python benchmarks/gpu_peers.py --only resnet50 --sides meshwright,torchvision
    python benchmarks/gpu_peers.py --only gemma3_1b --sides meshwright,plain_jax

Images are bytes in memory-mapped arrays (data=arrays), which both sides read ahead in threads; a
thread of the peer also pins them. In ResNet-50 both sides compute the statistics of batch norms in
float32 from bf16 activations, keep the running ones in float32, and write bf16: the peer by
autocast in channels_last, ours by nnx.BatchNorm under precision=bf16.

The cases gpt2_nano, vit_nano and resnet_nano run on a CPU in seconds, to try both sides; what runs
without a GPU is not recorded. PEER_PYTHON names an interpreter with PyTorch if this one has none.
Rows of cases that are not measured again stay in the record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peer_cases import CASES
from peer_power import PowerMeter
from peer_process import PEER_PYTHON, Worker

OF_PLAIN_JAX = 0.95
"""How many times the speed of the step by hand is asked for."""
NAMED = {"torchvision": "torchvision", "plain_jax": "plain JAX"}
"""Sides besides transformers, and how targets call them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="gpt2,gpt2_medium", help=", ".join(CASES))
    parser.add_argument("--turns", type=int, default=4, help="the first only warms up")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a turn lasts")
    parser.add_argument(
        "--steps", "--updates", type=int, default=20, help="between two looks at the clock"
    )
    parser.add_argument(
        "--sides", default="meshwright,transformers", help="or torchvision, plain_jax"
    )
    parser.add_argument("--extra", default="", help="further settings of meshwright, by spaces")
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "CASE", "DATA"))
    options = parser.parse_args()
    if options.worker:
        work(*options.worker, options.steps)
        return
    gpu = gpu_name()
    with_torch = options.sides != "meshwright"
    peak = matmul_peak() if gpu and with_torch else 0.0
    print(f"bf16 matmul peak: {peak / 1e12:.0f} TFLOP/s", flush=True)
    rows = [compare(name, options, peak) for name in options.only.split(",")]
    if gpu and with_torch and not options.extra:
        save(rows, gpu, peak)


def work(side: str, name: str, data: str, steps: int) -> None:
    """Train one side of a case, in turns."""
    side, _, settings = side.partition(":")
    if side == "meshwright":
        from peer_meshwright import train_meshwright

        train_meshwright(CASES[name], Path(data), steps, settings.split())
    elif side == "plain_jax":
        from peer_plain_jax import train_plain

        train_plain(CASES[name], Path(data), steps)
    else:
        from peer_torch import train_torch

        train_torch(CASES[name], side, Path(data), steps)


def compare(name: str, options: argparse.Namespace, peak: float) -> dict[str, Any]:
    """Train a case on each side in turns, and return the figures of both."""
    case = CASES[name]
    extra = f":{options.extra}" if options.extra else ""
    sides = {
        side: side + extra * (side == "meshwright")
        for side in options.sides.split(",")
        if side != "torchvision" or find_spec("torchvision")
    }
    with tempfile.TemporaryDirectory() as folder:
        data = case.data.write(Path(folder))
        workers = {
            side: Worker(spelled, name, data, options.steps, seconds=options.seconds)
            for side, spelled in sides.items()
        }
        for worker in workers.values():
            print(f"{name}: first step after {worker.first:.0f} s", flush=True)
        meter = PowerMeter()
        for _ in range(options.turns):
            for worker in workers.values():
                worker.take_turn()
        meter.end()
        row: dict[str, Any] = {"case": name, "batch": case.batch(), "unit": case.data.unit}
        for side, worker in workers.items():
            row[side] = worker.figures(case, peak)
            turns = worker.turns[1:] or worker.turns
            work = sum(turn["updates"] for turn in turns) * case.rows * case.data.units
            row[side] |= meter.during(turns, work)
            worker.end()
    peers = [side for side in workers if side != "meshwright"]
    if len(workers) == 2 and peers != list(workers):
        speed = f"{case.data.unit}_per_second"
        ours, other = row["meshwright"], row[peers[0]]
        row["command"] = " ".join(["python benchmarks/gpu_peers.py", *sys.argv[1:]])
        row["ratio"] = round(ours[speed] / other[speed], 3)
        if other["peak_gib"]:
            row["memory_ratio"] = round(ours["peak_gib"] / other["peak_gib"], 3)
    print(json.dumps(row), flush=True)
    return row


def save(rows: list[dict[str, Any]], gpu: str, peak: float) -> None:
    """Write the record: these rows, and those of cases that were not measured again."""
    from record import read_record, verdict, write_record

    measured = [row for row in rows if "ratio" in row]
    earlier = read_record("gpu_peers")
    names = {label(row) for row in measured}
    kept = [row for row in earlier.get("rows", []) if label(row) not in names]
    order = list(CASES)
    targets = {
        what: met
        for what, met in earlier.get("targets", {}).items()
        if what.split(":")[0] not in names
    }
    for row in measured:
        name = label(row)
        asked = OF_PLAIN_JAX if "plain_jax" in row else CASES[row["case"]].asked
        what = f"{name}: {row['unit']}/s at least {asked} × the peer's"
        targets[what] = f"{verdict(row['ratio'], asked, at_most=False)} ({row['ratio']})"
        if "plain_jax" in row:
            continue
        memory = row.get("memory_ratio", 0)
        targets[f"{name}: peak memory at most the peer's"] = f"{verdict(memory, 1)} ({memory})"
    figures = {
        "gpu": gpu,
        "matmul_tflops": round(peak / 1e12),
        "rows": sorted([*kept, *measured], key=lambda row: order.index(row["case"])),
        "targets": targets,
    }
    write_record("gpu_peers", figures, note=peer_versions())


def label(row: dict[str, Any]) -> str:
    """Return the name of a row in the list of targets."""
    other = next((name for name in NAMED if name in row), None)
    return f"{row['case']} of {NAMED[other]}" if other else row["case"]


def peer_versions() -> str:
    """Return the versions of what we are compared with."""
    code = "from importlib.metadata import version as v; print(v('torch'), v('transformers'))"
    torch, transformers = peer_python(code).split()
    torch = torch.split("+")[0]
    return f"peer: PyTorch {torch}, transformers {transformers}, torch.compile of model and loss"


def matmul_peak(size: int = 8192, times: int = 50) -> float:
    """Return the FLOP/s of a large bf16 product, measured in a process of its own."""
    code = (
        "import torch, time\n"
        f"a, b = (torch.randn({size}, {size}, device='cuda', dtype=torch.bfloat16) for _ in 'ab')\n"
        "for _ in range(10): a @ b\n"
        "torch.cuda.synchronize(); start = time.perf_counter()\n"
        f"for _ in range({times}): a @ b\n"
        "torch.cuda.synchronize(); print(time.perf_counter() - start)\n"
    )
    return 2 * size**3 * times / float(peer_python(code))


def peer_python(code: str) -> str:
    """Run a program with the interpreter that has PyTorch, and return what it prints."""
    command = [os.environ.get(PEER_PYTHON, sys.executable), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def gpu_name() -> str:
    """Return the name of the GPU; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found.splitlines()[0] if found else ""


if __name__ == "__main__":
    main()
