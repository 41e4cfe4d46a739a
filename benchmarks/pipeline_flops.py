"""Compares what pipeline stages compute, copy and hold with one device that does the same work.

Compiles the step of a GPT with 8 blocks on one device and in 4 stages; nothing runs. FLOPs are
those of the matrix products in the optimized program, each times how often the schedule makes a
stage run it, relative to the stage's share: its blocks, and the head on the last stage. Copies are
those of arrays larger than a message between stages, inside of ticks. Memory is that of
temporaries, relative to one device.

    python benchmarks/pipeline_flops.py [--json]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
from staged_gpt import StagedGpt

from meshwright.compiled.hlo import Computation, Instruction, Program, parse_hlo, trip_count
from meshwright.compiled.memory import memory_of
from meshwright.mesh.simulate import simulate_devices
from meshwright.pipeline.execute.tick_rows import OpCounts, count_operations
from meshwright.step.assemble import Assembled

STAGES, ROWS, MICROBATCHES = 4, 2, 16
SIZES = {"vocab_size": 2048, "context_length": 128, "hidden_size": 192, "num_heads": 3}
GPT = StagedGpt(SIZES, blocks=8, rows=ROWS, precision="bf16")
SCHEDULES = {"1f1b": 1, "zb_h1": 1}


def main() -> None:
    simulate_devices(STAGES)
    alone, _ = compiled_gpt(1, None, 1)
    reference = {"flops": flops(alone), "temp_bytes": memory_of(alone).temp}
    rows = [measure(name, chunks, reference) for name, chunks in SCHEDULES.items()]
    if "--json" in sys.argv:
        print(json.dumps({"one_device": reference, "schedules": rows}, indent=1))
        return
    print(f"one device: {reference['temp_bytes'] / 2**20:.0f} MiB of temporaries")
    for row in rows:
        shares = ", ".join(f"{share:.3f}" for share in row["flops_over_share"])
        print(
            f"{row['schedule']:12} FLOPs over share {shares}; copies per tick "
            f"{row['copied_per_tick'] / 2**20:.1f} MiB; temporaries "
            f"{row['temp_bytes'] / 2**20:.0f} MiB, {row['temp_over_one_device']:.2f} × one device"
        )


def measure(name: str, chunks: int, reference: dict[str, Any]) -> dict[str, Any]:
    compiled, assembled = compiled_gpt(STAGES, name, chunks)
    pipeline = assembled.step.pipeline
    assert pipeline is not None
    counts = count_operations(pipeline.schedule, MICROBATCHES, STAGES)
    executed = [flops(compiled, counts, stage) for stage in range(STAGES)]
    # One product forward, two backward.
    tokens = MICROBATCHES * ROWS * SIZES["context_length"]
    head = 3 * 2 * tokens * SIZES["vocab_size"] * SIZES["hidden_size"]
    blocks = (reference["flops"] - head) / STAGES
    shares = [*[blocks] * (STAGES - 1), blocks + head]
    temp = memory_of(compiled).temp
    return {
        "schedule": name,
        "flops_over_share": [a / b for a, b in zip(executed, shares, strict=True)],
        "copied_per_tick": copied_per_tick(compiled),
        "temp_bytes": temp,
        "temp_over_one_device": temp / reference["temp_bytes"],
    }


def flops(compiled: Any, counts: OpCounts | None = None, stage: int = 0) -> int:
    """Return the FLOPs of all products that a stage runs in a step."""
    program = parse_hlo(compiled.as_text())
    total = 0
    for computation, instruction, count in executed(program, program.entry, 1):
        if instruction.opcode == "dot":
            times = count if counts is None else counts.times(instruction.op_name, count, stage)
            total += times * product_flops(computation, instruction)
    return total


def product_flops(computation: Computation, product: Instruction) -> int:
    left = computation.by_name[product.operands[0]].shape.dims
    contracted = product.attributes["lhs_contracting_dims"].strip("{}").split(",")
    return 2 * product.shape.size * math.prod(left[int(dim)] for dim in contracted if dim)


def copied_per_tick(compiled: Any) -> int:
    """Return the bytes that ticks copy from one buffer to another, smaller ones left out."""
    program = parse_hlo(compiled.as_text())
    message = 2 * ROWS * SIZES["context_length"] * SIZES["hidden_size"]
    return sum(
        instruction.shape.bytes
        for computation, instruction, count in executed(program, program.entry, 1)
        if instruction.opcode == "copy"
        and count > 1
        and instruction.shape.bytes > message
        # Inside of a fusion, a copy is a change of layout.
        and not computation.name.startswith("fused")
    )


def executed(
    program: Program, computation: Computation, count: int
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yield every instruction, and how often it runs if every branch and loop of a tick runs."""
    for instruction in computation.instructions:
        yield computation, instruction, count
        times = count
        if instruction.opcode == "while":
            times *= trip_count(program, computation, instruction) or 1
        if instruction.opcode in ("while", "conditional", "call", "fusion"):
            roles = ("body", "branch_computations", "true_computation", "false_computation")
            for called in program.called_by(instruction, *roles, "calls", "to_apply"):
                yield from executed(program, called, times)


def compiled_gpt(stages: int, schedule: str | None, chunks: int) -> tuple[Any, Assembled]:
    batch = GPT.batch_shapes(MICROBATCHES)
    assembled = GPT.assemble(
        batch,
        MICROBATCHES,
        stages=stages,
        schedule=schedule,
        chunks=chunks,
        devices=jax.devices()[:stages],
    )
    return assembled.step.lower(jax.tree.leaves(batch)).compile(), assembled


if __name__ == "__main__":
    main()
