"""Measures the overhead and the memory of a four-stage pipeline on a single GPU.

One GPU compiles and runs the first of four stages (`jax_mock_gpu_topology`; communication is
mocked, so nothing waits). The stage's time for a step is compared with its share, by FLOPs, of
the time of the same step on one GPU without stages.

    python benchmarks/gpu_pipeline.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record import verdict, write_record

STAGES, ROWS, MICROBATCHES = 4, 4, 16
SIZES = {"vocab_size": 50304, "context_length": 1024, "hidden_size": 768, "num_heads": 12}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 3, "zb_h1": 1}


def main() -> None:
    # The mocked devices would wait for each other to tune kernels.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false"
    if "--alone" in sys.argv:
        print(json.dumps(alone()))
        return
    command = [sys.executable, __file__, "--alone"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    reference = json.loads(found.splitlines()[-1])
    print("one GPU", reference, flush=True)
    jax.config.update("jax_mock_gpu_topology", f"1x{STAGES}x1")
    rows = [staged(name, chunks, reference) for name, chunks in SCHEDULES.items()]
    targets = {
        f"{row['schedule']}: at most 1.3 × its share of one GPU's time": (
            f"{verdict(row['over_its_share'], 1.3)} ({row['over_its_share']})"
        )
        for row in rows
        if row["schedule"] in ("1f1b", "zb_h1")
    }
    more = round(rows[1]["temp_gib"] / reference["temp_gib"], 2)
    targets["1f1b: temporary memory at most 1.5 × that of one GPU"] = (
        f"{verdict(more, 1.5)} ({more})"
    )
    write_record(
        "gpu_pipeline",
        {
            "compiled_for": f"{STAGES} × {jax.local_devices()[0].device_kind} (mocked)",
            "model": f"GPT-2 124M, {MICROBATCHES} microbatches of {ROWS} rows of 1024 tokens, "
            f"bf16, AdamW, pipe={STAGES}",
            "one_gpu": reference,
            "rows": rows,
            "targets": targets,
        },
    )


def alone() -> dict[str, Any]:
    """Measure a step without stages."""
    assembled, batch = assemble_gpt(1, None, 1)
    return measure(assembled, batch)


def staged(name: str, chunks: int, reference: dict[str, Any]) -> dict[str, Any]:
    from meshwright.pipeline.pipeline_report import pipeline_report

    assembled, batch = assemble_gpt(STAGES, name, chunks)
    assert assembled.step.pipeline is not None
    stages = pipeline_report(assembled.step.pipeline).stages
    share = stages[0].flops / sum(stage.flops for stage in stages)
    row = {"schedule": name, **measure(assembled, batch)}
    ideal = reference["seconds"] * share
    row |= {"share_of_flops": round(share, 4), "over_its_share": round(row["seconds"] / ideal, 3)}
    print(json.dumps(row), flush=True)
    return row


def measure(assembled: Any, batch: Any) -> dict[str, Any]:
    from meshwright.compiled.memory import memory_of

    sharding = assembled.step.shardings.batch
    placed = [
        jax.make_array_from_process_local_data(sharding, np.asarray(leaf), leaf.shape)
        for leaf in jax.tree.leaves(batch)
    ]
    started = time.perf_counter()
    compiled = assembled.step.lower(placed).compile()
    compile_seconds = time.perf_counter() - started
    # Zeros compile fast, and computing with them takes as long as with any other values.
    abstract, shardings = assembled.step.abstract_state(), assembled.step.shardings.state
    zeros = jax.jit(
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract),
        out_shardings=shardings,
    )
    state = zeros()
    seconds: list[float] = []
    for _ in range(7):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, metrics = compiled(state, placed)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": round(min(seconds), 4),
        "temp_gib": round(memory_of(compiled).temp / 2**30, 2),
        "argument_gib": round(memory_of(compiled).argument / 2**30, 2),
        "compile_s": round(compile_seconds, 1),
    }


def assemble_gpt(stages: int, schedule: str | None, chunks: int) -> tuple[Any, Any]:
    # Meshwright is imported after the topology is set.
    from staged_gpt import StagedGpt

    gpt = StagedGpt(SIZES, blocks=12, rows=ROWS, precision="bf16", clip_norm=1.0)
    batch = gpt.batch(MICROBATCHES)
    assembled = gpt.assemble(batch, MICROBATCHES, stages=stages, schedule=schedule, chunks=chunks)
    return assembled, batch


if __name__ == "__main__":
    main()
