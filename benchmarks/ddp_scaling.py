"""Compares how data parallel training scales from one process to two, with PyTorch DDP over Gloo.

Each process has one core and one thread. A side trains alone in one process, and with twice the
batch in two; its efficiency is the throughput of two divided by twice that of one. Both sides train
the same MLP and the same CNN, in turns of about a second in which the other processes sleep. Ours
are processes of `meshwright launch` with `mw.Trainer`, theirs of torchrun with
DistributedDataParallel. One process of either is plain, without anything distributed.

    python benchmarks/ddp_scaling.py --torch-python PATH

PATH is an interpreter that has PyTorch; by default this one. It needs two cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ddp_turns import CASES, Group
from record import median_interval, verdict, write_record

LEAST = 0.95
"""Our efficiency over that of DDP."""
SIDES = ("meshwright", "torch")
COUNTS = (1, 2)
ROUNDS = 8
"""Rounds of one launch."""


def main() -> None:
    arguments = parse()
    rows: list[dict[str, Any]] = []
    for name in arguments.only.split(","):
        rows.append(measure(name, arguments))
        print(summary(rows[-1]), flush=True)
    if arguments.pairs < 20:
        print("not recorded: fewer than 20 pairs")
        return
    limit = f"our efficiency over DDP's: at least {LEAST}"
    targets = {
        f"{row['case']}, {limit}": verdict(row["ratio"]["median"], LEAST, at_most=False)
        for row in rows
    }
    code = "import torch; print(torch.__version__)"
    version = subprocess.run([arguments.torch_python, "-c", code], capture_output=True, text=True)
    write_record(
        "ddp_scaling",
        {"pairs": arguments.pairs, "rows": rows, "targets": targets},
        note=f"PyTorch {version.stdout.strip()}",
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", default=sys.executable, help="one that has PyTorch")
    parser.add_argument("--pairs", type=int, default=24, help="rounds in which all take a turn")
    parser.add_argument("--only", default=",".join(CASES), help="which models")
    return parser.parse_args()


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let both sides train in turns, and return how they scale."""
    rounds: list[dict[tuple[str, int], float]] = []
    while len(rounds) < arguments.pairs:
        rounds += _launch(name, arguments, len(rounds))
    return {"case": name, **figures(rounds)}


def _launch(
    name: str, arguments: argparse.Namespace, done: int
) -> list[dict[tuple[str, int], float]]:
    """Start all processes, and let them take some turns.

    How fast a process is depends by some percent on where its memory happens to be, so there are
    several launches.
    """
    rounds: list[dict[tuple[str, int], float]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups: dict[tuple[str, int], Group] = {}
        for side in SIDES:
            for count in COUNTS:
                own = folder / f"{side}-{count}"
                group = Group(side, name, count, own, python=arguments.torch_python)
                groups[side, count] = stack.enter_context(group)
        for group in groups.values():
            group.take_turn()
        for number in range(done, min(done + ROUNDS, arguments.pairs)):
            rounds.append(_round(groups, random.Random(number)))
            print(f"{name}: round {number + 1} of {arguments.pairs}", end="\r", flush=True)
    return rounds


def _round(
    groups: dict[tuple[str, int], Group], shuffle: random.Random
) -> dict[tuple[str, int], float]:
    """Let each group take a turn, in any order; return samples per second."""
    order = shuffle.sample(list(groups), len(groups))
    return {key: groups[key].take_turn() for key in order}


def figures(rounds: list[dict[tuple[str, int], float]]) -> dict[str, Any]:
    """Return the throughput, the efficiency of each side and their ratio, with intervals."""
    scaled = {side: [each[side, 2] / (2 * each[side, 1]) for each in rounds] for side in SIDES}
    ratios = [ours / theirs for ours, theirs in zip(*scaled.values(), strict=True)]
    return {
        "samples_per_second": {
            side: [round(statistics.median(each[side, count] for each in rounds), 1)
                   for count in COUNTS]
            for side in SIDES
        },
        "efficiency": {side: interval(values) for side, values in scaled.items()},
        "ratio": interval(ratios),
    }  # fmt: skip


def interval(values: list[float]) -> dict[str, Any]:
    median, low, high = median_interval(values)
    return {"median": round(median, 4), "interval": [round(low, 4), round(high, 4)]}


def summary(row: dict[str, Any]) -> str:
    sides = ", ".join(
        f"{side} {row['samples_per_second'][side]} samples/s, efficiency "
        f"{row['efficiency'][side]['median']:.3f} {row['efficiency'][side]['interval']}"
        for side in SIDES
    )
    return f"{row['case']}: {sides}; ratio {row['ratio']['median']:.3f} {row['ratio']['interval']}"


if __name__ == "__main__":
    main()
