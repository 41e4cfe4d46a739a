"""Compares LoRA with the full step, and with LoRA of transformers and peft, on one GPU.

Gemma 3 1B, 4×2048 tokens, bf16 compute, AdamW, clipping at norm 1.0. LoRA has rank 16 on every
linear layer over frozen weights in bf16; the full step has float32 master weights. Both keep the
same activations. The peer is transformers with peft, or with the same adapters written by hand
where peft cannot be imported, under torch.compile. All sides take turns of 20 seconds in processes
of their own, as in gpu_peers.py: the first turn of a side warms up.

    python benchmarks/gpu_lora.py [--turns 4] [--seconds 20] [--sides full,lora,transformers]
    python benchmarks/gpu_lora.py --tiny --turns 2 --seconds 1 --steps 2   # on a CPU

PEER_PYTHON names an interpreter with PyTorch if this one has none.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_peers import gpu_name
from peer_cases import CASES, GEMMA_1B, Case
from peer_power import PowerMeter
from peer_process import Worker

RANK = 16
LORA = f"lora.rank={RANK} lora.base_dtype=bfloat16"
TINY = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
OF_TIME, OF_MEMORY, OF_PEER = 0.8, 0.6, 1.2
"""The time and the memory of LoRA over the full step, at most; its tokens/s over the peer's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny Gemma 3, for CPUs")
    parser.add_argument("--turns", type=int, default=4, help="the first only warms up")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a turn lasts")
    parser.add_argument("--steps", type=int, default=20, help="between two looks at the clock")
    parser.add_argument("--sides", default="full,lora,transformers")
    parser.add_argument("--extra", default="", help="further settings of meshwright, by spaces")
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "CASE", "DATA"))
    options = parser.parse_args()
    if options.worker:
        work(*options.worker, options.steps)
        return
    name = "gemma3_nano" if options.tiny else "gemma3_1b"
    row = compare(name, options)
    print(json.dumps(row), flush=True)
    if gpu_name() and not options.tiny and not options.extra:
        from record import write_record

        write_record("gpu_lora", {"gpu": gpu_name(), "rows": [row], "targets": judged(row)})


def case_of(name: str) -> Case:
    """Return a case, the tiny one with a peer."""
    case = CASES[name]
    tiny = {**GEMMA_1B, **TINY, "query_pre_attn_scalar": 64}
    return case if case.peer else replace(case, peer=("Gemma3TextConfig", tiny))


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train on each side in turns, and return the figures of all."""
    case = case_of(name)
    ours = {"full": f"meshwright:{options.extra}", "lora": f"meshwright:{LORA} {options.extra}"}
    with tempfile.TemporaryDirectory() as folder:
        data = case.data.write(Path(folder))
        workers = {
            side: Worker(
                ours.get(side, side), name, data, options.steps,
                seconds=options.seconds, script=Path(__file__),
            )
            for side in options.sides.split(",")
        }  # fmt: skip
        for side, worker in workers.items():
            print(f"{side}: first step after {worker.first:.0f} s", flush=True)
        meter = PowerMeter()
        for _ in range(options.turns):
            for worker in workers.values():
                worker.take_turn()
        meter.end()
        row: dict[str, Any] = {"case": name, "batch": case.batch(), "rank": RANK}
        for side, worker in workers.items():
            turns = worker.turns[1:] or worker.turns
            done = sum(turn["updates"] for turn in turns) * case.rows * case.data.units
            row[side] = worker.figures(case, 0.0) | meter.during(turns, done)
            row[side] |= {k: turns[-1][k] for k in ("kernels", "adapters") if k in turns[-1]}
            worker.end()
    if "full" in row and "lora" in row:
        row["time_over_full"] = round(row["lora"]["ms"] / row["full"]["ms"], 3)
        memory = row["lora"]["peak_gib"] / max(row["full"]["peak_gib"], 1e-9)
        row["memory_over_full"] = round(memory, 3)
    if "lora" in row and "transformers" in row:
        row["over_peer"] = round(row["transformers"]["ms"] / row["lora"]["ms"], 3)
    return row


def judged(row: dict[str, Any]) -> dict[str, str]:
    """Return whether the targets are met."""
    from record import verdict

    asked = {
        f"time at most {OF_TIME} × the full step": ("time_over_full", OF_TIME, True),
        f"memory at most {OF_MEMORY} × the full step": ("memory_over_full", OF_MEMORY, True),
        f"tokens/s at least {OF_PEER} × the peer's": ("over_peer", OF_PEER, False),
    }
    return {
        what: f"{verdict(row[key], limit, at_most=at_most)} ({row[key]})"
        for what, (key, limit, at_most) in asked.items()
        if key in row
    }


def work(side: str, name: str, data: str, steps: int) -> None:
    """Train one side, in turns."""
    side, _, settings = side.partition(":")
    if side == "meshwright":
        from peer_meshwright import train_meshwright

        train_meshwright(CASES[name], Path(data), steps, settings.split())
    else:
        from peer_torch import train_torch

        train_torch(case_of(name), side, Path(data), steps, prepare=with_adapters)


def with_adapters(model: Any) -> tuple[Any, str]:
    """Return a model of PyTorch with frozen weights in bf16 and adapters, and who made them."""
    import torch

    model = model.to(torch.bfloat16)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return by_hand(model), "by hand"
    # As "all-linear" in peft: every linear layer but the output layer.
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    return get_peft_model(model, config), "peft"


def by_hand(model: Any) -> Any:
    """Return a model with an adapter on every linear layer but the output layer."""
    import torch

    class Adapted(torch.nn.Module):
        """A linear layer and its adapter, in float32 under autocast as in peft."""

        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer
            down = torch.empty(RANK, layer.in_features)
            torch.nn.init.kaiming_uniform_(down, a=5**0.5)
            self.down = torch.nn.Parameter(down)
            self.up = torch.nn.Parameter(torch.zeros(layer.out_features, RANK))

        def forward(self, x: Any) -> Any:
            linear = torch.nn.functional.linear
            return self.layer(x) + linear(linear(x, self.down), self.up)

    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear) and child is not head:
                setattr(parent, name, Adapted(child))
    return model


if __name__ == "__main__":
    main()
