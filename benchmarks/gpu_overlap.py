"""Records which part of what a step of GPT-2 124M sends overlaps with computing on GPUs.

JAX's compiler for GPUs is needed, a GPU is not: the ledger reads the compiler's schedule, and
nothing runs.

    python benchmarks/gpu_overlap.py
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from meshwright.config.schema import ShardingConfig
from meshwright.hardware import parse_hardware
from meshwright.mesh.simulate import simulate_devices
from meshwright.planner.devices.absent_gpus import absent_gpus, can_compile_for, cudnn_version
from meshwright.runtime.jax_internals import attention_on

DEVICES, ROWS = 8, 16
GPT2: dict[str, Any] = {
    "vocab_size": 50304,
    "context_length": 1024,
    "hidden_size": 768,
    "num_heads": 12,
    "num_blocks": 12,
    "dropout": 0.0,
}
Blocks = Literal["scan", "unroll"]
CASES: tuple[tuple[str, Blocks], ...] = (
    ("fsdp", "unroll"),
    ("data", "unroll"),
    ("fsdp", "scan"),
    ("data", "scan"),
)


def main() -> None:
    from record import write_record

    hardware = parse_hardware(f"{DEVICES}xH200")
    if not can_compile_for(hardware):
        sys.exit("this benchmark needs JAX's compiler for GPUs: pip install 'jax[cuda12]'")
    simulate_devices(1)
    devices = absent_gpus(hardware)
    assert hardware.chip.cores is not None
    with attention_on(hardware.chip.cores.capability, cudnn_version()):
        rows = [measure(axis, blocks, devices) for axis, blocks in CASES]
    figures = {
        "compiled_for": f"{DEVICES} × {devices[0].device_kind} (none of them here)",
        "model": f"GPT-2 124M, {ROWS} rows of 1024 tokens per device, bf16, AdamW, clip 1.0",
        "targets": {},
        "rows": rows,
    }
    write_record("gpu_overlap", figures)


def measure(axis: str, blocks: Blocks, devices: list[Any]) -> dict[str, Any]:
    """Compile a step and return what its ledger says about an axis of all devices."""
    from small_gpt import assemble_gpt, batch_shapes

    from meshwright.ledgers import make_ledger

    assembled = assemble_gpt(
        {axis: DEVICES},
        sharding=ShardingConfig(blocks=blocks),
        per_replica=ROWS,
        precision="bf16",
        clip_norm=1.0,
        devices=devices,
        **GPT2,
    )
    ledger = make_ledger(assembled, batch_shapes(assembled))
    print(ledger, flush=True)
    own = ledger.axes[axis].model_dump(mode="json")
    kept = ("sent_bytes", "overlapped_bytes", "overlapped", "overlap")
    return {
        "mesh": ledger.mesh,
        "blocks": blocks,
        **{name: own[name] for name in kept},
        "not_overlapped": [each.model_dump(mode="json") for each in ledger.not_overlapped],
        "compile_seconds": ledger.compile_seconds,
    }


if __name__ == "__main__":
    main()
