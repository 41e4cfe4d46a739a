"""Compares the memory that the planner predicts for GPUs with what their compiler says.

Each plan is rehearsed with `meshwright rehearse`; JAX's compiler for GPUs is needed. Where there is
a GPU, the program of one device also runs, and the peak of its memory is compared too.

    python benchmarks/gpu_memory.py [--only WORD …] [--at-once 6]

With --only, only cases whose name has one of the words are compared, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_peers import gpu_name
from record import verdict, write_record

from meshwright.hardware import parse_hardware
from meshwright.planner.devices.absent_gpus import can_compile_for

CHIP = "H200"
WORST = 0.10
"""The error that is asked for, at most."""
GPT2 = ("model=gpt2", "model.dropout=0")
CASES: dict[str, tuple[str, ...]] = {
    "GPT-2 124M, one GPU": (*GPT2, "training.micro_batch_size=16"),
    "GPT-2 124M, one GPU, remat=full": (
        *(*GPT2, "training.micro_batch_size=16", "sharding.remat=full"),
    ),
    "GPT-2 124M, one GPU, blocks=scan": (
        *(*GPT2, "training.micro_batch_size=16", "sharding.blocks=scan"),
    ),
    "GPT-2 124M, data=8": (*GPT2, "training.micro_batch_size=16", "mesh.data=8"),
    "GPT-2 124M, fsdp=8": (*GPT2, "training.micro_batch_size=16", "mesh.fsdp=8"),
    "GPT-2 124M, fsdp=8, blocks=scan": (
        *(*GPT2, "training.micro_batch_size=16", "mesh.fsdp=8", "sharding.blocks=scan"),
    ),
    "GPT-2 124M, fsdp=4 × tensor=2": (
        *(*GPT2, "training.micro_batch_size=16", "mesh.fsdp=4", "mesh.tensor=2"),
    ),
    "GPT-2 124M, data=2 × fsdp=4, 4 microbatches": (
        *(*GPT2, "training.micro_batch_size=4", "training.gradient_accumulation_steps=4"),
        *("mesh.data=2", "mesh.fsdp=4"),
    ),
    "GPT-2 124M, pipe=4 × data=2, 1f1b": (
        *(*GPT2, "training.micro_batch_size=4", "pipeline.num_microbatches=8"),
        *("mesh.pipe=4", "mesh.data=2"),
    ),
    "GPT-2 124M, pipe=2 × fsdp=4, 1f1b": (
        *(*GPT2, "training.micro_batch_size=4", "pipeline.num_microbatches=8"),
        *("mesh.pipe=2", "mesh.fsdp=4"),
    ),
    "GPT-2 124M, pipe=4 × tensor=2, zb_h1": (
        *(*GPT2, "training.micro_batch_size=4", "pipeline.num_microbatches=8"),
        *("mesh.pipe=4", "mesh.tensor=2", "pipeline.schedule=zb_h1"),
    ),
    "GPT-2 124M, pipe=2 × fsdp=2 × tensor=2, remat=full": (
        *(*GPT2, "training.micro_batch_size=4", "pipeline.num_microbatches=8"),
        *("mesh.pipe=2", "mesh.fsdp=2", "mesh.tensor=2", "sharding.remat=full"),
    ),
    "GPT-2 355M, pipe=4 × data=4 × tensor=4, 1f1b": (
        *("model=gpt2_medium", "model.dropout=0", "training.micro_batch_size=4"),
        *("pipeline.num_microbatches=16", "mesh.pipe=4", "mesh.data=4", "mesh.tensor=4"),
    ),
    "Gemma 3 270M, pipe=2 × fsdp=4, 1f1b": (
        *("model=gemma3_270m", "training.micro_batch_size=2", "pipeline.num_microbatches=8"),
        *("mesh.pipe=2", "mesh.fsdp=4"),
    ),
    "GPT-2 355M, data=8 × fsdp=8": (
        *("model=gpt2_medium", "model.dropout=0", "training.micro_batch_size=16"),
        *("mesh.data=8", "mesh.fsdp=8"),
    ),
    "GPT-2 355M, data=2 × fsdp=16 × tensor=2, remat=dots": (
        *("model=gpt2_medium", "model.dropout=0", "training.micro_batch_size=16"),
        *("mesh.data=2", "mesh.fsdp=16", "mesh.tensor=2", "sharding.remat=dots"),
    ),
    "Gemma 3 270M, fsdp=8": ("model=gemma3_270m", "training.micro_batch_size=4", "mesh.fsdp=8"),
    "Gemma 3 270M, fsdp=8, remat=dots, blocks=scan": (
        *("model=gemma3_270m", "training.micro_batch_size=4", "mesh.fsdp=8"),
        *("sharding.remat=dots", "sharding.blocks=scan"),
    ),
    "Gemma 3 1B, fsdp=8, remat=full, blocks=scan": (
        *("model=gemma3_1b", "training.micro_batch_size=4", "mesh.fsdp=8"),
        *("sharding.remat=full", "sharding.blocks=scan"),
    ),
    "Qwen 3 0.6B, data=4 × fsdp=2, remat=dots": (
        *("model=qwen3_0.6b", "training.micro_batch_size=2", "mesh.data=4", "mesh.fsdp=2"),
        *("sharding.remat=dots",),
    ),
    "Llama 3 1B, fsdp=8, remat=full": (
        *("model=llama3_1b", "training.micro_batch_size=2", "mesh.fsdp=8", "sharding.remat=full"),
    ),
    **{
        f"Llama 3 1B, 2 blocks, 131,072 tokens, context=8, remat={remat}": (
            *("model=llama3_1b", "model.num_blocks=2", "model.context_length=131072"),
            *("data.sequence_length=131072", "training.micro_batch_size=1", "mesh.context=8"),
            f"sharding.remat={remat}",
        )
        for remat in ("none", "full")
    },
    "ViT-B, one GPU": ("model=vit_b", "training.micro_batch_size=64"),
    "ViT-B, fsdp=8": ("model=vit_b", "training.micro_batch_size=64", "mesh.fsdp=8"),
    "ResNet-50, one GPU": ("model=resnet50", "training.micro_batch_size=64"),
    "ResNet-50, data=8": ("model=resnet50", "training.micro_batch_size=64", "mesh.data=8"),
}
"""By name, what is typed after `meshwright rehearse`."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--at-once", type=int, default=1, help="plans rehearsed at a time")
    options = parser.parse_args()
    only: list[str] = options.only
    if not can_compile_for(parse_hardware(CHIP)):
        sys.exit("this benchmark needs JAX's compiler for GPUs: pip install 'jax[cuda12]'")
    chosen = {
        name: words
        for name, words in CASES.items()
        if not only or any(word in name for word in only)
    }
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for name, found in zip(chosen, pool.map(rehearse, chosen.values()), strict=True):
            rows.append({"case": name, **found})
            print(line(rows[-1]), flush=True)
    targets = summarize(rows)
    for what, found in targets.items():
        print(f"{what}: {found}")
    if not only:
        gpu = gpu_name()
        compiled_for = f"{CHIP} (one of them here)" if gpu else f"{CHIP} (none of them here)"
        figures = {"gpu": gpu, "compiled_for": compiled_for, "targets": targets, "rows": rows}
        write_record("gpu_memory", figures)


def line(row: dict[str, Any]) -> str:
    """Return a row for reading."""
    text = f"{row['case']:52s} {row['total_bytes'] / 2**30:7.2f} GiB, predicted "
    text += f"{row['predicted_total_bytes'] / 2**30:7.2f} GiB, {row['error']:+.1%}"
    if "peak_bytes" in row:
        text += f"; peak {row['peak_bytes'] / 2**30:7.2f} GiB, {row['peak_error']:+.1%}"
    return f"{text}; compiled in {row['compile_seconds']} s"


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return whether the targets are met."""
    wrong = sum(row["state_error"] != 0 for row in rows)
    targets = {"training state: exact": verdict(wrong, 0)}
    for what, key in (("compiled", "error"), ("measured", "peak_error")):
        errors = [abs(row[key]) for row in rows if key in row]
        if errors:
            worst, median = max(errors), statistics.median(errors)
            targets[f"memory, {what}: worst error at most {WORST:.0%}"] = (
                f"{verdict(worst, WORST)} ({worst:.1%}, median {median:.1%})"
            )
    return targets


def rehearse(words: tuple[str, ...], on: str = "gpu") -> dict[str, Any]:
    """Rehearse a plan, and return what it needs and what was predicted."""
    count = math.prod(int(word.split("=")[1]) for word in words if word.startswith("mesh."))
    command = [sys.executable, "-P", "-m", "meshwright", "rehearse", f"hardware={count}x{CHIP}"]
    settings = [*words, "training.mixed_precision=bf16", "--on", on, "--json"]
    # Several at a time share one GPU.
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [*command, *settings], capture_output=True, text=True, check=False, env=env
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    report = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in report["figures"]}
    total, peak = figures["all of the program"], figures.get("peak of the memory in use")
    measured = (
        {}
        if peak is None
        else {
            "peak_bytes": peak["value"],
            "predicted_peak_bytes": peak["predicted"],
            "peak_error": round(peak["error"], 4),
            "compute_seconds": round(figures["computing"]["value"], 4),
        }
    )
    return {
        "words": " ".join(words),
        "total_bytes": total["value"],
        "predicted_total_bytes": total["predicted"],
        "error": rounded(total["error"]),
        "state_error": figures["state"]["error"],
        **measured,
        "rest_error": rounded(figures["temporary values"]["error"]),
        "sent_errors": {
            name.removeprefix("sent over "): round(figure["error"] or 0.0, 4)
            for name, figure in figures.items()
            if name.startswith("sent over ")
        },
        "overlapped": report["overlapped"],
        "compile_seconds": report["compile_seconds"],
    }


def rounded(error: float | None) -> float | None:
    """Return an error with fewer digits; programs for CPUs are not compared."""
    return None if error is None else round(error, 4)


if __name__ == "__main__":
    main()
