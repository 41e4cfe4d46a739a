"""Records which part of what a step of GPT-2 124M sends overlaps with computing on GPUs.

One GPU compiles the program of eight (`jax_mock_gpu_topology`), and the ledger reads the compiler's
schedule; nothing runs.

    python benchmarks/gpu_overlap.py
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

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
CASES: tuple[tuple[str, Blocks], ...] = (("fsdp", "unroll"), ("data", "unroll"), ("fsdp", "scan"))


def main() -> None:
    # The mocked devices would wait for each other to tune kernels.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false"
    import jax
    from record import write_record

    jax.config.update("jax_mock_gpu_topology", f"1x{DEVICES}x1")
    if jax.default_backend() != "gpu":
        sys.exit("this benchmark needs a GPU, whose compiler schedules the program")
    rows = [measure(axis, blocks, ROWS, GPT2) for axis, blocks in CASES]
    figures = {
        "compiled_for": f"{DEVICES} × {jax.local_devices()[0].device_kind} (mocked)",
        "model": f"GPT-2 124M, {ROWS} rows of 1024 tokens per device, bf16, AdamW, clip 1.0",
        "targets": {},
        "rows": rows,
    }
    write_record("gpu_overlap", figures)


def measure(axis: str, blocks: Blocks, rows: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Compile a step and return what its ledger says about an axis of all devices."""
    from small_gpt import assemble_gpt, batch_shapes

    from meshwright.config.schema import ShardingConfig
    from meshwright.ledgers import make_ledger

    sharding = ShardingConfig(blocks=blocks)
    assembled = assemble_gpt(
        {axis: DEVICES},
        sharding=sharding,
        per_replica=rows,
        precision="bf16",
        clip_norm=1.0,
        **sizes,
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
