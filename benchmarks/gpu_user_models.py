"""Compares decoders as users write them with ours, with kernels and without, on one GPU.

The decoders of user_models.py are trained by `meshwright train model.kind=user_models:Mha …`, on
the same tokens as our GPT-2 of the same size: 12 blocks of width 768, 32 rows of 1024 tokens, bf16.
Each runs in a process of its own, and those of a group take turns. Our model with kernels is in
every group, and ratios are to it. A group is what fits into the memory of one GPU.

    python benchmarks/gpu_user_models.py [--turns 4] [--steps 15]
    python benchmarks/gpu_user_models.py --nano --turns 2 --steps 2    # on a CPU, not recorded
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from gpu_peers import gpu_name
from peer_cases import CASES
from peer_process import Worker
from record import verdict, write_record

OURS = "gpt2"
GROUPS = (
    (("gpt2", ""), ("user_mha", ""), ("user_hand", "")),
    (("gpt2", ""), ("gpt2", "none")),
    (("gpt2", ""), ("user_mha", "none")),
    (("gpt2", ""), ("user_hand", "none")),
)
"""Cases, and what is set for kernels."""
AT_LEAST = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", "--updates", type=int, default=15, help="steps of a turn")
    parser.add_argument("--groups", default="0,1,2,3", help="which groups, by number")
    parser.add_argument("--kernels", default="auto", help="auto, or xla to see them on a CPU")
    parser.add_argument("--nano", action="store_true", help="tiny models, for trying it out")
    options = parser.parse_args()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for number in map(int, options.groups.split(",")):
        for key, row in compare(GROUPS[number], options).items():
            rows.setdefault(key, row)
    shown = [{"case": case, "kernels": kernels, **row} for (case, kernels), row in rows.items()]
    if gpu_name() and not options.nano and options.groups == "0,1,2,3":
        targets = {
            f"{row['case']}: tokens/s at least {AT_LEAST} × those of our model": (
                f"{verdict(row['ratio'], AT_LEAST, at_most=False)} ({row['ratio']})"
            )
            for row in shown
            if row["kernels"] != "none" and row["case"] != OURS
        }
        write_record("gpu_user_models", {"gpu": gpu_name(), "rows": shown, "targets": targets})


def compare(
    group: tuple[tuple[str, str], ...], options: argparse.Namespace
) -> dict[tuple[str, str], dict[str, Any]]:
    """Train a group in turns, and return the figures of each member."""
    with tempfile.TemporaryDirectory() as folder:
        data = CASES[OURS].data.write(Path(folder))
        workers: dict[tuple[str, str], Worker] = {}
        for name, kernels in group:
            chosen = kernels or options.kernels
            case = f"{name}_nano" if options.nano else name
            side = f"meshwright:kernels={chosen}"
            worker = workers[name, chosen] = Worker(side, case, data, options.steps)
            # One after the other: no start should compete with another for the processor.
            print(f"{name} kernels={chosen}: first step after {worker.first:.0f} s", flush=True)
        for _ in range(options.turns):
            for worker in workers.values():
                worker.take_turn()
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for (name, chosen), worker in workers.items():
            case = CASES[f"{name}_nano" if options.nano else name]
            used = worker.turns[-1]["kernels"]
            rows[name, chosen] = worker.figures(case, 0.0) | {"kernels_used": used}
            worker.end()
    ours = rows[OURS, options.kernels]["ms"]
    rows = {key: row | {"ratio": round(ours / row["ms"], 3)} for key, row in rows.items()}
    for (name, chosen), row in rows.items():
        print(
            f"{name:10} kernels={chosen:5} {row['tokens_per_second']:9,} tokens/s "
            f"{row['ms']:8.2f} ms {row['peak_gib']:6.2f} GiB {row['ratio']:6.3f} × ours  "
            f"{row['kernels_used']}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
