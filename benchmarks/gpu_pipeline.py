"""Measures the overhead and the memory of a four-stage pipeline on a single GPU.

One GPU compiles and runs the first of four stages (`jax_mock_gpu_topology`; communication is
mocked, so nothing waits). The stage's time for a step is compared with what its blocks take on
one GPU without stages: what a step of all 12 blocks takes longer than one of 9. It is also compared
with its share, by FLOPs, of the time of all. Weights and tokens are random, as in a training.

    python benchmarks/gpu_pipeline.py [--seconds 20]
    python benchmarks/gpu_pipeline.py --nano    # on virtual CPU devices, not recorded
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record import verdict, write_record

STAGES, ROWS, MICROBATCHES, BLOCKS = 4, 4, 16, 12
SIZES = {"vocab_size": 50304, "context_length": 1024, "hidden_size": 768, "num_heads": 12}
NANO = {"vocab_size": 64, "context_length": 16, "hidden_size": 16, "num_heads": 2}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 3, "zb_h1": 1}
LIMITS = {"1f1b": 1.15, "interleaved": 1.3, "zb_h1": 1.25}
"""Of the time of a stage's blocks."""


def main() -> None:
    options = read_options()
    flags = os.environ.get("XLA_FLAGS", "")
    if options.nano:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={STAGES}"
        jax.config.update("jax_platforms", "cpu")
    else:
        # The mocked devices would wait for each other to tune kernels.
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false"
    if options.alone:
        print(json.dumps(measure(*assemble_gpt(options, 1, None, 1, options.alone), options)))
        return
    reference, fewer = (measure_apart(blocks) for blocks in (BLOCKS, BLOCKS - BLOCKS // STAGES))
    own = round(reference["seconds"] - fewer["seconds"], 4)
    print("one GPU", reference, f"a stage's blocks: {own} s", flush=True)
    if not options.nano:
        jax.config.update("jax_mock_gpu_topology", f"1x{STAGES}x1")
    rows = [staged(name, chunks, reference, own, options) for name, chunks in SCHEDULES.items()]
    targets = {
        f"{row['schedule']}: at most {LIMITS[row['schedule']]} × the time of its blocks": (
            f"{verdict(row['over_its_blocks'], LIMITS[row['schedule']])} ({row['over_its_blocks']})"
        )
        for row in rows
        if row["schedule"] in LIMITS
    }
    more = round(rows[1]["temp_gib"] / max(reference["temp_gib"], 0.01), 2)
    targets["1f1b: temporary memory at most 1.5 × that of one GPU"] = (
        f"{verdict(more, 1.5)} ({more})"
    )
    figures = {
        "compiled_for": f"{STAGES} × {jax.local_devices()[0].device_kind} (mocked)",
        "model": f"GPT-2 124M, {MICROBATCHES} microbatches of {ROWS} rows of 1024 tokens, "
        f"bf16, AdamW, pipe={STAGES}, {options.seconds:g} s each",
        "one_gpu": reference,
        "blocks_of_a_stage": {"seconds": own},
        "rows": rows,
        "targets": targets,
    }
    if not options.nano:
        write_record("gpu_pipeline", figures)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each measurement")
    parser.add_argument("--nano", action="store_true", help="a tiny model, for trying it out")
    parser.add_argument("--alone", type=int, help="blocks without stages; used by the script")
    return parser.parse_args()


def measure_apart(blocks: int) -> dict[str, Any]:
    """Measure a step without stages, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", str(blocks)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(found.splitlines()[-1])


def staged(
    name: str, chunks: int, reference: dict[str, Any], own: float, options: argparse.Namespace
) -> dict[str, Any]:
    from meshwright.pipeline.pipeline_report import pipeline_report

    assembled, batch = assemble_gpt(options, STAGES, name, chunks)
    assert assembled.step.pipeline is not None
    stages = pipeline_report(assembled.step.pipeline).stages
    share = stages[0].flops / sum(stage.flops for stage in stages)
    row = {"schedule": name, **measure(assembled, batch, options)}
    ideal = reference["seconds"] * share
    row |= {"share_of_flops": round(share, 4), "over_its_share": round(row["seconds"] / ideal, 3)}
    row["over_its_blocks"] = round(row["seconds"] / own, 3)
    print(json.dumps(row), flush=True)
    return row


def measure(assembled: Any, batch: Any, options: argparse.Namespace) -> dict[str, Any]:
    from meshwright.compiled.memory import memory_of

    sharding = assembled.step.shardings.batch
    placed = [
        jax.make_array_from_process_local_data(sharding, np.asarray(leaf), leaf.shape)
        for leaf in jax.tree.leaves(batch)
    ]
    started = time.perf_counter()
    compiled = assembled.step.lower(placed).compile()
    compile_seconds = time.perf_counter() - started
    state = random_state(assembled)
    seconds: list[float] = []
    ends = time.perf_counter() + options.seconds
    while time.perf_counter() < ends or len(seconds) < 7:
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, metrics = compiled(state, placed)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    return {
        # The second half, when clocks have settled.
        "seconds": round(statistics.median(seconds[len(seconds) // 2 :]), 4),
        "steps": len(seconds),
        "temp_gib": round(memory_of(compiled).temp / 2**30, 2),
        "argument_gib": round(memory_of(compiled).argument / 2**30, 2),
        "compile_s": round(compile_seconds, 1),
    }


def random_state(assembled: Any) -> Any:
    """Return a state without zeros, with which products would take less power."""
    abstract, shardings = assembled.step.abstract_state, assembled.step.shardings.state

    def fill(struct: Any) -> Any:
        if not jnp.issubdtype(struct.dtype, jnp.floating):
            return jnp.zeros(struct.shape, struct.dtype)
        numbers = jax.lax.iota(jnp.float32, struct.size).reshape(struct.shape)
        # Positive, as second moments are; no generator of random numbers compiles as fast.
        return (0.01 + 0.02 * jnp.abs(jnp.sin(numbers * 12.9898))).astype(struct.dtype)

    return jax.jit(lambda: jax.tree.map(fill, abstract), out_shardings=shardings)()


def assemble_gpt(
    options: argparse.Namespace,
    stages: int,
    schedule: str | None,
    chunks: int,
    blocks: int = BLOCKS,
) -> tuple[Any, Any]:
    # Meshwright is imported after the topology is set.
    from staged_gpt import StagedGpt

    sizes = NANO if options.nano else SIZES
    gpt = StagedGpt(sizes, blocks=blocks, rows=ROWS, precision="bf16", clip_norm=1.0)
    batch, devices = gpt.batch(MICROBATCHES), jax.devices()[:stages]
    return gpt.assemble(
        batch, MICROBATCHES, stages=stages, schedule=schedule, chunks=chunks, devices=devices
    ), batch


if __name__ == "__main__":
    main()
