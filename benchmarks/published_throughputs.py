"""Compares predicted throughputs with those that others have published, tokens/s per GPU.

Every row is a run of another framework, with its mesh, batch and recomputation; the prediction is
for Meshwright with the same ones. What a framework does by itself, such as its kernels, is part of
the error. Nothing runs on a GPU.

    python benchmarks/published_throughputs.py [--only A100]
"""

from __future__ import annotations

import argparse
import statistics
from functools import cache
from typing import Any, NamedTuple

ASKED = 0.15
"""The median error that is asked for, at most."""

SOURCES = {
    "llm-foundry": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "MaxText, Llama 3 70B": "https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources/maxtext-llama3-70b-dgxc-benchmarking-d",
    "MaxText, Llama 2 70B": "https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources/maxtext-llama2-70b-dgxc-benchmarking-c",
    "JAX-Toolbox, Llama 2 7B": "https://github.com/NVIDIA/JAX-Toolbox",
    "Megatron-LM": "https://arxiv.org/abs/2104.04473",
}
NOTES = {
    "JAX-Toolbox, Llama 2 7B": "its microbatch is not given; 4 sequences are assumed",
    "torchtitan": "its H100s have memory of 2.4 TB/s and a limit of 500 W, not 3.35 TB/s and 700 W",
    "Megatron-LM": "Table 1, from TFLOP/s by its formula; its attention is not fused",
}


class Run(NamedTuple):
    """A published run.

    Attributes:
        source: who measured it.
        model: the name of the model below.
        length: tokens of a sequence.
        hardware: the devices.
        mesh: sizes of axes.
        micro: sequences of a microbatch per device, of all devices of a tensor axis together.
        steps: microbatches per step.
        remat: what the backward pass recomputes.
        tokens: published tokens/s per GPU.
    """

    source: str
    model: str
    length: int
    hardware: str
    mesh: dict[str, int]
    micro: int
    steps: int
    remat: str
    tokens: float


def mpt(model: str, length: int, hardware: str, micro: int, steps: int, remat: str, tokens: int,
        ) -> Run:  # fmt: skip
    """Return a run of llm-foundry: FSDP over all GPUs."""
    nodes, _, rest = hardware.partition("x")
    count = int(nodes) * 8 if rest.count("x") else 8
    return Run("llm-foundry", model, length, hardware, {"fsdp": count}, micro, steps, remat, tokens)


def megatron(model: str, nodes: int, tensor: int, micro: int, batch: int, tflops: float) -> Run:
    """Return a run of Megatron-LM: whole copies over a tensor axis, everything recomputed."""
    _, blocks, width, _ = MODELS[model]
    length, vocabulary, replicas = 2048, 51_200, nodes * 8 // tensor
    flops = 96 * blocks * width**2 * (
        1 + length / (6 * width) + vocabulary / (16 * blocks * width)
    )  # fmt: skip
    mesh = {"data": replicas, "tensor": tensor}
    return Run("Megatron-LM", model, length, f"{nodes}x8xA100-80GB", mesh, micro,
               batch // replicas // micro, "full", tflops * 1e12 / flops)  # fmt: skip


MODELS: dict[str, tuple[str, int, int, int]] = {
    "125m": ("gpt", 12, 768, 12),
    "350m": ("gpt", 24, 1024, 16),
    "760m": ("gpt", 24, 1536, 12),
    "1b": ("gpt", 24, 2048, 16),
    "3b": ("gpt", 32, 2560, 20),
    "7b": ("gpt", 32, 4096, 32),
    "13b": ("gpt", 40, 5120, 40),
    "30b": ("gpt", 48, 7168, 56),
    "70b": ("gpt", 80, 8192, 64),
    "megatron 1.7b": ("gpt", 24, 2304, 24),
    "megatron 3.6b": ("gpt", 30, 3072, 32),
    "megatron 7.5b": ("gpt", 36, 4096, 32),
    "megatron 18.4b": ("gpt", 40, 6144, 48),
    "llama 3 8b": ("llama3", 32, 4096, 32),
    "llama 3 70b": ("llama3", 80, 8192, 64),
    "llama 2 70b": ("llama3", 80, 8192, 64),
    "llama 2 7b": ("llama3", 32, 4096, 32),
}
"""By name: the kind, its blocks, width and heads."""
LLAMAS = {
    "llama 3 8b": {"vocab_size": 128_256, "mlp_size": 14_336},
    "llama 3 70b": {"vocab_size": 128_256, "mlp_size": 28_672},
    "llama 2 70b": {"vocab_size": 32_000, "mlp_size": 28_672},
    "llama 2 7b": {"vocab_size": 32_000, "mlp_size": 11_008, "num_kv_heads": 32},
}
H100, A100, SMALL = "H100", "A100-80GB", "A100-40GB"
RUNS = (
    mpt("70b", 2048, f"8x8x{H100}", 8, 4, "full", 1039),
    mpt("70b", 2048, f"4x8x{H100}", 2, 16, "full", 882),
    mpt("30b", 2048, f"4x8x{H100}", 14, 3, "full", 2308),
    mpt("30b", 2048, f"2x8x{H100}", 10, 3, "full", 2263),
    mpt("30b", 2048, f"8x{H100}", 3, 21, "full", 2002),
    mpt("30b", 4096, f"8x{H100}", 1, 21, "full", 1802),
    mpt("13b", 2048, f"8x8x{H100}", 2, 1, "none", 4800),
    mpt("13b", 2048, f"8x{H100}", 2, 1, "none", 4792),
    mpt("13b", 4096, f"8x{H100}", 10, 3, "full", 4717),
    mpt("7b", 2048, f"8x{H100}", 6, 1, "none", 10_643),
    mpt("7b", 4096, f"8x{H100}", 16, 2, "full", 8611),
    mpt("7b", 8192, f"8x{H100}", 8, 2, "full", 6935),
    mpt("3b", 2048, f"8x8x{H100}", 6, 3, "none", 22_525),
    mpt("3b", 2048, f"2x8x{H100}", 10, 3, "none", 24_142),
    mpt("3b", 1024, f"8x{H100}", 20, 6, "none", 27_046),
    mpt("1b", 2048, f"8x8x{H100}", 20, 1, "none", 44_402),
    mpt("1b", 2048, f"8x{H100}", 14, 1, "none", 45_455),
    mpt("760m", 2048, f"8x{H100}", 24, 2, "none", 63_147),
    Run("torchtitan", "llama 3 8b", 8192, f"8x{H100}", {"fsdp": 8}, 2, 1, "dots", 6667),
    Run("torchtitan", "llama 3 8b", 8192, f"16x8x{H100}", {"fsdp": 128}, 2, 1, "dots", 6514),
    Run("MaxText, Llama 3 70B", "llama 3 70b", 8192, f"16x8x{H100}", {"fsdp": 128}, 2, 1, "full",
        1052),
    Run("MaxText, Llama 2 70B", "llama 2 70b", 4096, f"8x8x{H100}", {"fsdp": 64}, 2, 1, "full",
        1036),
    Run("JAX-Toolbox, Llama 2 7B", "llama 2 7b", 4096, f"8x{H100}", {"fsdp": 8}, 4, 1, "dots",
        11_360),
    mpt("70b", 2048, f"8x8x{A100}", 8, 4, "full", 410),
    mpt("30b", 2048, f"8x{A100}", 3, 21, "full", 916),
    mpt("13b", 2048, f"8x{A100}", 2, 3, "none", 2262),
    mpt("7b", 2048, f"8x{A100}", 6, 2, "none", 4641),
    mpt("7b", 8192, f"8x{A100}", 8, 2, "full", 3206),
    mpt("3b", 2048, f"8x{A100}", 10, 2, "none", 10_811),
    mpt("1b", 2048, f"8x{A100}", 14, 4, "none", 20_513),
    mpt("760m", 2048, f"8x{A100}", 24, 2, "none", 32_434),
    mpt("350m", 1024, f"8x{A100}", 64, 2, "none", 64_813),
    mpt("125m", 1024, f"8x{A100}", 64, 2, "none", 156_468),
    mpt("70b", 2048, f"16x8x{SMALL}", 4, 1, "full", 376),
    mpt("30b", 2048, f"16x8x{SMALL}", 6, 1, "full", 865),
    mpt("13b", 2048, f"16x8x{SMALL}", 16, 1, "full", 1972),
    mpt("7b", 2048, f"16x8x{SMALL}", 18, 1, "full", 3623),
    megatron("megatron 1.7b", 4, 1, 4, 512, 137),
    megatron("megatron 3.6b", 8, 2, 4, 512, 138),
    megatron("megatron 7.5b", 16, 4, 4, 512, 142),
    megatron("megatron 18.4b", 32, 8, 4, 1024, 135),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the source, model or hardware")
    only = parser.parse_args().only
    import jax

    jax.config.update("jax_platforms", "cpu")
    chosen = [run for run in RUNS if only in f"{run.source} {run.model} {run.hardware}"]
    rows: list[dict[str, Any]] = []
    for run in chosen:
        rows.append(compared(run))
        print(line(rows[-1]), flush=True)
    print(f"median {median(rows):.1%}")
    if not only:
        save(rows)


def compared(run: Run) -> dict[str, Any]:
    """Return a run with what is predicted for it."""
    from meshwright.hardware import parse_hardware

    hardware = parse_hardware(run.hardware)
    estimate = estimator(run.model, run.length).estimate(planned(run), hardware)
    samples = estimate.plan.batch.global_batch_size
    tokens = samples * run.length / hardware.count / estimate.time.step
    return {
        **run._asdict(),
        "predicted": round(tokens),
        "mfu": round(estimate.time.mfu, 3),
        "error": tokens / run.tokens - 1,
    }


def planned(run: Run) -> Any:
    """Return the plan of a run; blocks run as plans choose by default."""
    from meshwright.config.batch import solve_batch
    from meshwright.config.schema import ShardingConfig
    from meshwright.plan import Plan
    from meshwright.planner.search.candidates import MOST_UNROLLED

    unrolls = MODELS[run.model][1] <= MOST_UNROLLED
    sharding = ShardingConfig.model_validate(
        {"remat": run.remat, "blocks": "unroll" if unrolls else "scan"}
    )
    replicas = run.mesh.get("data", 1) * run.mesh.get("fsdp", 1)
    batch = solve_batch(
        replicas=replicas, micro_batch_size=run.micro, gradient_accumulation_steps=run.steps
    )
    return Plan(mesh=run.mesh, batch=batch, sharding=sharding, precision="bf16")


@cache
def estimator(name: str, length: int) -> Any:
    """Return what estimates plans for a model with sequences of a length."""
    import optax

    from meshwright.models import build_model
    from meshwright.planner.estimate.estimator import Estimator
    from meshwright.tasks import find_task

    kind, blocks, width, heads = MODELS[name]
    sizes: dict[str, Any] = {"num_blocks": blocks, "hidden_size": width, "num_heads": heads}
    if kind == "gpt":
        sizes |= {"vocab_size": 50_368, "dropout": 0.0}
    else:
        sizes |= {"num_kv_heads": 8, "head_dim": 128, **LLAMAS[name]}
    sizes["context_length"] = length
    task = find_task("language_modeling")(vocab_size=sizes["vocab_size"], context_length=length)
    return Estimator(
        lambda rngs: build_model(kind, rngs=rngs, **sizes),
        task.loss,
        optax.adamw(1e-4, weight_decay=0.1),
        task.example_batch(1),
        precision="bf16",
    )


def line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    name = f"{row['source']}: {row['model']} × {row['length']}, {row['hardware']}"
    return (
        f"{name:58} {row['predicted']:>8,} of {row['tokens']:>9,.0f} tokens/s per GPU "
        f"({row['error']:+.1%}), MFU {row['mfu']:.0%}"
    )


def median(rows: list[dict[str, Any]]) -> float:
    """Return the median of the sizes of the errors."""
    return statistics.median(abs(row["error"]) for row in rows)


def save(rows: list[dict[str, Any]]) -> None:
    """Write the record."""
    from record import verdict, write_record

    whole = median(rows)
    by_source = {
        source: f"{median(own):.1%}"
        for source in SOURCES
        if (own := [row for row in rows if row["source"] == source])
    }
    targets = {"median error at most 15%": f"{verdict(whole, ASKED)} ({whole:.1%})"}
    figures = {"sources": SOURCES, "notes": NOTES, "median_by_source": by_source}
    write_record("published_throughputs", {**figures, "rows": rows, "targets": targets})


if __name__ == "__main__":
    main()
