"""Compares predicted with compiled memory of 12 models × 3 meshes that no rule was made for.

Predictions come first, and are printed before anything is compiled; then each plan is compiled by
JAX's compiler for GPUs, as `meshwright rehearse` does. None of the models is in gpu_memory.py.

    python benchmarks/gpu_unseen.py [--only WORD …] [--at-once 8] [--predict]

With --predict nothing is compiled, which needs no compiler for GPUs. With --only, only cases whose
name has one of the words are compared, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_memory import CHIP, rehearse
from gpu_peers import gpu_name
from record import verdict, write_record

MEDIAN, WORST = 0.10, 0.20
"""The errors that are asked for, at most."""
TOKENS = 1024
_DECODER = f"task.context_length={TOKENS}"
MODELS: dict[str, tuple[str, int]] = {
    "GPT, 6 wide blocks": (
        "model=gpt2 model.dropout=0 model.num_blocks=6 model.hidden_size=1280 model.num_heads=20",
        8,
    ),
    "GPT with dropout": ("model=gpt2 model.dropout=0.1 model.num_blocks=8", 8),
    "GPT as a stack": (
        "model=stacked_gpt_tiny model.dropout=0 model.num_blocks=8 model.hidden_size=1024 "
        f"model.num_heads=16 model.vocab_size=32000 model.context_length={TOKENS}",
        8,
    ),
    "Llama, 4 blocks": (f"model=llama3_1b model.num_blocks=4 {_DECODER}", 4),
    "Llama, whole keys": (
        "model=llama3_1b model.num_blocks=6 model.num_kv_heads=32 model.mlp_size=5632 "
        f"model.vocab_size=32000 {_DECODER}",
        4,
    ),
    "Qwen, 8 blocks": (f"model=qwen3_0.6b model.num_blocks=8 {_DECODER}", 4),
    "Qwen, wide": (
        "model=qwen3_0.6b model.num_blocks=4 model.hidden_size=2048 model.mlp_size=8192 "
        f"{_DECODER}",
        4,
    ),
    "Gemma, 6 blocks": (f"model=gemma3_1b model.num_blocks=6 {_DECODER}", 2),
    "Experts": (
        "model=moe_tiny model.dropout=0 model.num_blocks=4 model.hidden_size=768 "
        "model.num_heads=12 model.num_experts=8 model.expert_size=2048 model.vocab_size=32000 "
        f"model.context_length={TOKENS}",
        4,
    ),
    "ViT, 6 wide blocks": ("model=vit_l model.num_blocks=6", 32),
    "ViT of 384 pixels": ("model=vit_b model.num_blocks=6 model.image_size=384", 16),
    "MLP, 8192 wide": ("model=mlp model.widths=[784,8192,8192,8192,10]", 256),
}
"""By name: the settings, and samples per device."""
MESHES: dict[str, tuple[str, ...]] = {
    "fsdp=8": ("mesh.fsdp=8",),
    "data=2 × fsdp=4, remat=full": ("mesh.data=2", "mesh.fsdp=4", "sharding.remat=full"),
    "fsdp=4 × tensor=2": ("mesh.fsdp=4", "mesh.tensor=2"),
}


def cases() -> dict[str, tuple[str, ...]]:
    """Return, by name, what is typed after `meshwright rehearse`."""
    return {
        f"{model}, {mesh}": (*words.split(), f"training.micro_batch_size={rows}", *sizes)
        for model, (words, rows) in MODELS.items()
        for mesh, sizes in MESHES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--at-once", type=int, default=8, help="plans compiled at a time")
    parser.add_argument("--predict", action="store_true")
    options = parser.parse_args()
    only: list[str] = options.only
    chosen = {
        name: words
        for name, words in cases().items()
        if not only or any(word in name for word in only)
    }
    if options.predict:
        for name, words in chosen.items():
            print(f"{name:44s} {predict(words) / 2**30:7.2f} GiB predicted", flush=True)
        return
    from meshwright.hardware import parse_hardware
    from meshwright.planner.devices.absent_gpus import can_compile_for

    if not can_compile_for(parse_hardware(CHIP)):
        sys.exit("this benchmark needs JAX's compiler for GPUs: pip install 'jax[cuda12]'")
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for name, found in zip(chosen, pool.map(rehearse, chosen.values()), strict=True):
            rows.append({"case": name, **found})
            print(line(rows[-1]), flush=True)
    targets = summarize(rows)
    for what, found in targets.items():
        print(f"{what}: {found}")
    if not only:
        here = "one of them here" if gpu_name() else "none of them here"
        figures = {"compiled_for": f"{CHIP} ({here})", "targets": targets, "rows": rows}
        write_record("gpu_unseen", figures)


def predict(words: tuple[str, ...]) -> int:
    """Return the bytes that are predicted for a program, of one device."""
    from meshwright.cli.auto_settings import config_estimator
    from meshwright.config.compose import compose_config, validate
    from meshwright.hardware import parse_hardware
    from meshwright.plan import make_plan

    config = validate(compose_config([*words, "training.mixed_precision=bf16"]))
    count = math.prod(int(word.split("=")[1]) for word in words if word.startswith("mesh."))
    plan = make_plan(config, count)
    estimator = config_estimator(config, plan.batch.global_batch_size)
    return estimator.estimate(plan, parse_hardware(f"{count}x{CHIP}")).memory.compiled


def line(row: Mapping[str, Any]) -> str:
    """Return a row for reading."""
    return (
        f"{row['case']:44s} {row['total_bytes'] / 2**30:7.2f} GiB, predicted "
        f"{row['predicted_total_bytes'] / 2**30:7.2f} GiB, {row['error']:+.1%}; compiled in "
        f"{row['compile_seconds']} s"
    )


def summarize(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return whether the targets are met."""
    errors = [abs(row["error"]) for row in rows]
    median, worst = statistics.median(errors), max(errors)
    return {
        "memory: median error at most 10%": f"{verdict(median, MEDIAN)} ({median:.1%})",
        "memory: worst error at most 20%": f"{verdict(worst, WORST)} ({worst:.1%})",
    }


if __name__ == "__main__":
    main()
