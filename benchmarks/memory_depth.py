"""Measures how the memory of an FSDP step grows with depth, and checks the listed argument sizes.

Compiles the step of a GPT (its blocks an `nnx.List`) with 4 and with 16 blocks on 8 virtual
devices, for all settings of `blocks` and `keep_gathered`; nothing runs. With full remat, a block
saves only its input, and each device holds its shard of the gradients: both necessarily grow with
depth. The remaining temporary memory is gathered weights and intermediate results.

    python benchmarks/memory_depth.py
"""

from __future__ import annotations

from typing import Any

from record import verdict, write_record
from small_gpt import assemble_gpt, batch_shapes

from meshwright.compiled.memory import memory_of
from meshwright.config.schema import ShardingConfig
from meshwright.mesh.simulate import simulate_devices
from meshwright.sharding.placement import bytes_per_device
from meshwright.step.assemble import Assembled

DEVICES, SHALLOW, DEEP = 8, 4, 16
CONTEXT, VOCABULARY = 32, 64
"""A short context and a small vocabulary, so that blocks dominate the memory."""

KINDS = (
    ("scan", False, 256),
    ("scan", False, 128),
    ("scan", True, 256),
    ("unroll", False, 256),
    ("unroll", True, 256),
)
"""`sharding.blocks`, `sharding.keep_gathered` and the width of the model."""

MESHES = ({"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2})
FLAT = 1.1
"""The largest ratio of 16 blocks to 4 that counts as no growth."""


def main() -> None:
    simulate_devices(DEVICES)
    print(f"{'blocks':8}{'gathered':10}{'width':>6}{'':4}remaining / one block, 4 → 16 blocks")
    kinds = [measure_kind(*kind) for kind in KINDS]
    growth = kinds[0]["growth_of_rest"]
    arguments = [compare_arguments(mesh) for mesh in MESHES]
    equal = all(found["compiled_bytes"] == found["listed_bytes"] for found in arguments)
    targets = {
        "growth of the remaining memory from 4 to 16 blocks, `scan` and gathered again": (
            f"at most {FLAT}: {verdict(growth, FLAT)}"
        ),
        "argument bytes, compiled and listed": "equal: " + ("met" if equal else "missed"),
    }
    for name, found in targets.items():
        print(f"{name}: {found}")
    model = f"GPT, context {CONTEXT}, vocabulary {VOCABULARY}, one row per device, AdamW, fsdp=8"
    figures = {"model": model, "remat": "full", "kinds": kinds, "arguments": arguments}
    write_record("memory_depth", {**figures, "targets": targets})


def measure_kind(blocks: str, keep: bool, width: int) -> dict[str, Any]:
    """Compile both depths and compare their remaining temporary memory."""
    rows = [measure(blocks, keep, width, depth) for depth in (SHALLOW, DEEP)]
    shallow, deep = (row["rest_bytes"] for row in rows)
    block = rows[0]["block_bytes"]
    found = {
        "blocks": blocks,
        "keep_gathered": keep,
        "width": width,
        "rest_in_blocks": [round(rest / block, 2) for rest in (shallow, deep)],
        "growth_of_rest": round(deep / shallow, 3),
        "growth_of_temp": round(rows[1]["temp_bytes"] / rows[0]["temp_bytes"], 3),
        "depths": rows,
    }
    few, many = found["rest_in_blocks"]
    kept = "kept" if keep else "again"
    times = f"× {found['growth_of_rest']:.2f}"
    print(f"{blocks:8}{kept:10}{width:6}{few:10.2f} →{many:6.2f}  {times}", flush=True)
    return found


def measure(blocks: str, keep: bool, width: int, depth: int) -> dict[str, int]:
    """Compile one step and split its temporary memory; all figures are bytes per device."""
    sharding = ShardingConfig(blocks=blocks, keep_gathered=keep, remat="full")
    assembled = assemble_gpt(
        {"fsdp": DEVICES},
        sharding=sharding,
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        num_blocks=depth,
        hidden_size=width,
        dropout=0.0,
    )
    temp = memory_of(assembled.step.lower(batch_shapes(assembled)).compile()).temp
    # One row per device, in float32.
    inputs = depth * CONTEXT * width * 4
    gradients = gradient_bytes(assembled)
    return {
        "depth": depth,
        "temp_bytes": temp,
        "saved_inputs_bytes": inputs,
        "gradient_bytes": gradients,
        "rest_bytes": temp - inputs - gradients,
        "block_bytes": block_bytes(assembled),
    }


def gradient_bytes(assembled: Assembled) -> int:
    """Return the bytes of gradients per device."""
    pairs = zip(assembled.traced.leaves, assembled.decision.gradients, strict=True)
    return sum(
        bytes_per_device(leaf, placement, assembled.plan.mesh)
        for leaf, placement in pairs
        if leaf.role == "param"
    )


def block_bytes(assembled: Assembled) -> int:
    """Return the bytes of one block's parameters, unsharded."""
    leaves = assembled.traced.layout.leaves
    own = [leaf for leaf in leaves if leaf.path.startswith("blocks.0.") and leaf.role == "param"]
    return sum(leaf.nbytes for leaf in own)


def compare_arguments(mesh: dict[str, int]) -> dict[str, Any]:
    """Compare the compiled step's argument bytes with the listed shards and the batch."""
    assembled = assemble_gpt(mesh)
    compiled = memory_of(assembled.step.lower(batch_shapes(assembled)).compile()).argument
    listed = listed_bytes(assembled)
    name = " × ".join(f"{axis}={size}" for axis, size in mesh.items())
    print(f"arguments on {name}: {compiled} compiled, {listed} listed", flush=True)
    return {"mesh": mesh, "compiled_bytes": compiled, "listed_bytes": listed}


def listed_bytes(assembled: Assembled) -> int:
    """Add up the shards of parameters, other state, optimizer, step counter and batch."""
    sizes = assembled.plan.mesh
    leaves = zip(assembled.traced.leaves, assembled.decision.at_rest, strict=True)
    model = sum(bytes_per_device(leaf, placement, sizes) for leaf, placement in leaves)
    optimizer = sum(
        leaf.nbytes // leaf.placement.shards(sizes) for leaf in assembled.step.optimizer.leaves
    )
    counter = 4
    rows = assembled.plan.batch.micro_batch_size
    batch = sum(rows * row_bytes(leaf) for leaf in assembled.traced.batch)
    return model + optimizer + counter + batch


def row_bytes(leaf: Any) -> int:
    """Return the bytes of one sample of a batch's array."""
    count = 1
    for size in leaf.shape[1:]:
        count *= size
    return count * leaf.dtype.itemsize


if __name__ == "__main__":
    main()
