"""Compares the memory that the planner predicts for GPUs with what their compiler says.

Each plan is rehearsed with `meshwright rehearse` for GPUs of which none is here; JAX's compiler for
GPUs is needed.

    python benchmarks/gpu_memory.py [--only WORD …]

With --only, only cases whose name has one of the words are compared, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from typing import Any

from record import verdict, write_record

from meshwright.hardware import parse_hardware
from meshwright.planner.devices.absent_gpus import can_compile_for

CHIP = "H200"
MEDIAN, WORST = 0.05, 0.10
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
    "GPT-2 355M, data=8 × fsdp=8": (
        *("model=gpt2_medium", "model.dropout=0", "training.micro_batch_size=16"),
        *("mesh.data=8", "mesh.fsdp=8"),
    ),
    "GPT-2 355M, data=2 × fsdp=16 × tensor=2, remat=dots": (
        *("model=gpt2_medium", "model.dropout=0", "training.micro_batch_size=16"),
        *("mesh.data=2", "mesh.fsdp=16", "mesh.tensor=2", "sharding.remat=dots"),
    ),
    "Gemma 3 270M, fsdp=8": ("model=gemma3_270m", "training.micro_batch_size=4", "mesh.fsdp=8"),
    "ViT-B, one GPU": ("model=vit_b", "training.micro_batch_size=64"),
    "ViT-B, fsdp=8": ("model=vit_b", "training.micro_batch_size=64", "mesh.fsdp=8"),
    "ResNet-50, one GPU": ("model=resnet50", "training.micro_batch_size=64"),
    "ResNet-50, data=8": ("model=resnet50", "training.micro_batch_size=64", "mesh.data=8"),
}
"""By name, what is typed after `meshwright rehearse`."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    only: list[str] = parser.parse_args().only
    if not can_compile_for(parse_hardware(CHIP)):
        sys.exit("this benchmark needs JAX's compiler for GPUs: pip install 'jax[cuda12]'")
    rows: list[dict[str, Any]] = []
    for name, words in CASES.items():
        if only and not any(word in name for word in only):
            continue
        rows.append({"case": name, **rehearse(words)})
        row = rows[-1]
        print(
            f"{name:52s} {row['total_bytes'] / 2**30:7.2f} GiB, predicted "
            f"{row['predicted_total_bytes'] / 2**30:7.2f} GiB, {row['error']:+.1%}; "
            f"compiled in {row['compile_seconds']} s",
            flush=True,
        )
    errors = [abs(row["error"]) for row in rows]
    wrong = sum(row["state_error"] != 0 for row in rows)
    median, worst = statistics.median(errors), max(errors)
    targets = {
        "training state: exact": verdict(wrong, 0),
        f"memory: median error at most {MEDIAN:.0%}": f"{verdict(median, MEDIAN)} ({median:.1%})",
        f"memory: worst error at most {WORST:.0%}": f"{verdict(worst, WORST)} ({worst:.1%})",
    }
    for what, found in targets.items():
        print(f"{what}: {found}")
    if not only:
        compiled_for = f"{CHIP} (none of them here)"
        write_record("gpu_memory", {"compiled_for": compiled_for, "targets": targets, "rows": rows})


def rehearse(words: tuple[str, ...]) -> dict[str, Any]:
    """Rehearse a plan, and return what it needs and what was predicted."""
    count = math.prod(int(word.split("=")[1]) for word in words if word.startswith("mesh."))
    command = [sys.executable, "-P", "-m", "meshwright", "rehearse", f"hardware={count}x{CHIP}"]
    settings = [*words, "training.mixed_precision=bf16", "--on", "gpu", "--json"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    report = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in report["figures"]}
    total = figures["all of the program"]
    return {
        "words": " ".join(words),
        "total_bytes": total["value"],
        "predicted_total_bytes": total["predicted"],
        "error": round(total["error"], 4),
        "state_error": figures["state"]["error"],
        "rest_error": round(figures["temporary values"]["error"], 4),
        "sent_errors": {
            name.removeprefix("sent over "): round(figure["error"] or 0.0, 4)
            for name, figure in figures.items()
            if name.startswith("sent over ")
        },
        "overlapped": report["overlapped"],
        "compile_seconds": report["compile_seconds"],
    }


if __name__ == "__main__":
    main()
