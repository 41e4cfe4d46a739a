"""Measures memory, compile time and bubble of a four-stage pipeline for all schedules.

Compiles the step of a GPT with 8 blocks on 4 virtual devices, for 4, 16 and 64 microbatches of the
same size; nothing runs. The bubble is simulated from the table of ticks that the compiled program
executes, assuming that forward passes, input gradients and weight gradients take the same time.
Virtual devices share their cores, so measured waiting times would mean nothing.

    python benchmarks/pipeline.py
"""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import jax
from record import verdict, write_record
from staged_gpt import StagedGpt

from meshwright.compiled.memory import memory_of
from meshwright.mesh.simulate import simulate_devices
from meshwright.pipeline.schedule.schedules import Schedule, get_schedule

STAGES, BLOCKS, ROWS = 4, 8, 4
MICROBATCHES = (4, 16, 64)
SIZES = {"vocab_size": 256, "context_length": 64, "hidden_size": 64, "num_heads": 4}
GPT = StagedGpt(SIZES, BLOCKS, ROWS)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1")

FLAT = 1.3
"""Largest ratio of temporary memory, 64 to 16 microbatches, that counts as no growth."""
NEAR = 0.05
"""Largest relative deviation of the simulated bubble from the formula."""
SMALLER = 0.45
"""Largest bubble of zb_h1 relative to that of 1f1b, for 8 microbatches."""


def main() -> None:
    simulate_devices(STAGES)
    found = {
        name: [measure(get_schedule(name), count) for count in MICROBATCHES] for name in SCHEDULES
    }
    growth = {name: rows[-1]["temp_bytes"] / rows[-2]["temp_bytes"] for name, rows in found.items()}
    slower = max(rows[-1]["compile_cpu_s"] / rows[0]["compile_cpu_s"] for rows in found.values())
    deviation = max(
        abs(row["bubble"] / row["formula"] - 1) for n in ("gpipe", "1f1b") for row in found[n]
    )
    ratio = float(bubble(get_schedule("zb_h1"), 8) / bubble(get_schedule("1f1b"), 8))
    targets = {
        "temporary memory of 1f1b, 64 microbatches relative to 16": f"{growth['1f1b']:.2f}, at "
        f"most {FLAT}: {verdict(growth['1f1b'], FLAT)}",
        "temporary memory of gpipe, 64 microbatches relative to 16": f"{growth['gpipe']:.2f}, "
        "grows: " + verdict(growth["gpipe"], FLAT, at_most=False),
        "bubble of gpipe and 1f1b, compared with (S-1)/(M+S-1)": f"within {deviation:.1%}, at most "
        f"{NEAR:.0%}: {verdict(deviation, NEAR)}",
        "bubble of zb_h1 relative to 1f1b, 8 microbatches": f"{ratio:.3f}, at most {SMALLER}: "
        + verdict(ratio, SMALLER),
        "compile time (CPU time), 64 microbatches relative to 4": f"{slower:.2f}, at most "
        f"{FLAT}: {verdict(slower, FLAT)}",
    }
    for name, text in targets.items():
        print(f"{name}: {text}")
    model = f"GPT, {BLOCKS} blocks, width 64, {ROWS} rows of 64 tokens a microbatch, AdamW, pipe=4"
    write_record("pipeline", {"model": model, "schedules": found, "targets": targets})


def measure(schedule: Schedule, count: int) -> dict[str, Any]:
    batch = GPT.batch_shapes(count)
    assembled = GPT.assemble(
        batch, count, stages=STAGES, schedule=schedule.name, chunks=schedule.num_chunks
    )
    lowered = assembled.step.lower(jax.tree.leaves(batch))
    started = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - started
    row = {
        "microbatches": count,
        "temp_bytes": memory_of(compiled).temp,
        "compile_cpu_s": round(seconds, 1),
        "ticks": len(schedule.table(count, STAGES).ticks),
        "bubble": float(bubble(schedule, count)),
        "formula": float(schedule.bubble(count, STAGES)),
    }
    print(
        f"{schedule.name:12}{count:4} microbatches{row['temp_bytes'] / 1e6:8.2f} MB"
        f"{seconds:7.1f} s  bubble {row['bubble']:.3f}, formula {row['formula']:.3f}",
        flush=True,
    )
    return row


def bubble(schedule: Schedule, count: int) -> Fraction:
    """Return the share of time that stages wait, from the table that the program executes."""
    return schedule.table(count, STAGES).timeline().bubble


if __name__ == "__main__":
    main()
