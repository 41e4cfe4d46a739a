"""Compares training on one GPU with Hugging Face transformers and torch.compile.

Both sides train the same model on the same token file with AdamW, clipping at norm 1.0, float32
master weights and bf16 compute. Each runs in a process of its own; they take turns, a few updates
at a time, so that clocks and temperature are alike.

    python benchmarks/gpu_peers.py [--only gpt2,gpt2_medium] [--turns 5] [--updates 20]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MARK = "@measured "
NUM_TOKENS = 20_000_000
BEGAN = "GPU_PEERS_BEGAN"
TURNS = "GPU_PEERS_TURNS"


@dataclass(frozen=True)
class Case:
    """One model and batch, as both sides spell it.

    Attributes:
        rows: samples of an update.
        length: tokens of a row.
        vocab_size: size of the vocabulary.
        overrides: the model for `meshwright train`.
        peer: name of the transformers config class, and its arguments.
        heads: the attention's size in FLOPs: blocks times width.
    """

    rows: int
    length: int
    vocab_size: int
    overrides: tuple[str, ...]
    peer: tuple[str, dict[str, Any]]
    heads: int


def gpt2(
    name: str, blocks: int, width: int, heads: int, *, rows: int, length: int = 1024,
    dropout: float = 0.0,
) -> Case:  # fmt: skip
    """Return GPT-2 of some size, with a vocabulary that is a multiple of 128."""
    sizes = {"vocab_size": 50304, "n_positions": length, "n_layer": blocks, "n_embd": width}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    own = (f"model={name}", "model.vocab_size=50304", f"model.dropout={dropout}")
    peer = ("GPT2Config", sizes | {"n_head": heads, "use_cache": False} | rates)
    return Case(rows, length, 50304, own, peer, blocks * width)


GEMMA_1B = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "use_cache": False,
}
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_cache": False,
}
CASES = {
    "gpt2_nano": gpt2("gpt2_nano", 2, 64, 4, rows=4, length=64),
    "gpt2": gpt2("gpt2", 12, 768, 12, rows=32),
    "gpt2_dropout": gpt2("gpt2", 12, 768, 12, rows=32, dropout=0.1),
    "gpt2_medium": gpt2("gpt2_medium", 24, 1024, 16, rows=16),
    "gemma3_1b": Case(
        4, 2048, 262144, ("model=gemma3_1b",), ("Gemma3TextConfig", GEMMA_1B), 26 * 1024
    ),
    "llama3_1b": Case(4, 2048, 128256, ("model=llama3_1b",), ("LlamaConfig", LLAMA_1B), 16 * 2048),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="gpt2,gpt2_medium", help=", ".join(CASES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="updates of a turn")
    parser.add_argument("--sides", default="meshwright,transformers")
    parser.add_argument("--extra", default="", help="further settings of meshwright, by spaces")
    parser.add_argument("--save", action="store_true", help="write results/gpu_peers.json")
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "CASE", "TOKENS"))
    options = parser.parse_args()
    if options.worker:
        side, name, tokens = options.worker
        work = {"meshwright": train_meshwright, "transformers": train_transformers}[side]
        work(CASES[name], Path(tokens), options)
        return
    peak = matmul_peak() if "transformers" in options.sides else math.nan
    print(f"bf16 matmul peak: {peak / 1e12:.0f} TFLOP/s", flush=True)
    rows = [compare(name, options, peak) for name in options.only.split(",")]
    from record import write_record

    write_record(
        "gpu_peers", {"gpu": gpu_name(), "matmul_tflops": round(peak / 1e12), "rows": rows}
    )


def compare(name: str, options: argparse.Namespace, peak: float) -> dict[str, Any]:
    """Train a case on each side in turns, and return the figures of both."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        drawn = np.random.default_rng(0).integers(0, min(case.vocab_size, 50_000), NUM_TOKENS)
        np.save(tokens, drawn.astype(np.uint32))
        # One after the other: neither start should compete for the processor.
        workers = {side: Worker(side, name, tokens, options) for side in options.sides.split(",")}
        for _ in range(options.turns):
            for worker in workers.values():
                worker.take_turn()
        row: dict[str, Any] = {"case": name, "rows": case.rows, "length": case.length}
        for side, worker in workers.items():
            row[side] = worker.figures(case, peak)
            worker.end()
    if len(workers) == 2:
        ours, peers = (row[side] for side in ("meshwright", "transformers"))
        row["tokens_ratio"] = round(ours["tokens_per_second"] / peers["tokens_per_second"], 3)
        row["memory_ratio"] = round(ours["peak_gib"] / peers["peak_gib"], 3)
    print(json.dumps(row), flush=True)
    return row


class Worker:
    """A process that trains when it is told to."""

    def __init__(self, side: str, name: str, tokens: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", side, name, str(tokens)]
        command += ["--updates", str(options.updates), "--extra", options.extra]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", BEGAN: str(time.time())}
        log = Path(os.environ.get("OUT", tempfile.gettempdir())) / f"{name}_{side}.log"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
            env=env,
        )  # fmt: skip
        self.first = self._read()["first_update"]
        self._turns: list[dict[str, Any]] = []

    def take_turn(self) -> None:
        """Let it train for one turn."""
        self._say("go")
        self._turns.append(self._read())

    def figures(self, case: Case, peak: float) -> dict[str, Any]:
        """Return what was measured; the first turn only warms up."""
        turns = self._turns[1:] or self._turns
        seconds = statistics.median(turn["seconds"] / turn["updates"] for turn in turns)
        tokens = case.rows * case.length
        params = turns[-1]["parameters"]
        flops = tokens * (6 * params + 12 * case.heads * case.length / 2)
        return {
            "tokens_per_second": round(tokens / seconds),
            "ms": round(seconds * 1e3, 2),
            "peak_gib": round(max(turn["peak"] for turn in turns) / 2**30, 2),
            "mfu_of_peak": round(flops / seconds / peak, 3),
            "first_update_s": round(self.first, 1),
            "loss": round(turns[-1]["loss"], 4),
            "parameters": params,
        }

    def end(self) -> None:
        """End the process."""
        self._say("end")
        self._process.wait(timeout=120)

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise SystemExit(f"a side ended early with exit code {self._process.wait()}")


def since_start() -> float:
    """Return the seconds since this process was started."""
    return time.time() - float(os.environ[BEGAN])


def tell(**figures: Any) -> None:
    """Tell the process that compares what was measured."""
    os.write(int(os.environ.get(TURNS, "1")), f"{MARK}{json.dumps(figures)}\n".encode())


def told_to_go() -> bool:
    """Wait for the next turn; false at the end."""
    return sys.stdin.readline().strip() == "go"


def train_meshwright(case: Case, tokens: Path, options: argparse.Namespace) -> None:
    """Run `meshwright train` with a callback that waits for each turn."""
    from meshwright.cli.main import main as meshwright

    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["GPU_PEERS_UPDATES"] = str(options.updates)
    with tempfile.TemporaryDirectory() as folder:
        # The command sends what it prints on stdout to the log while it trains.
        os.environ[TURNS] = str(os.dup(1))
        code = meshwright(
            [
                "train", *case.overrides, "data=tokens", f"data.path={tokens}",
                f"data.sequence_length={case.length}", f"training.global_batch_size={case.rows}",
                "training.steps=100000", "training.sample_tokens=0", "precision=bf16",
                "checkpoint=none", "data.eval_fraction=0", "optimizer.schedule=constant",
                "optimizer.learning_rate=1e-4",
                "optimizer.clip_norm=1.0", f"tracking.log_every={options.updates}",
                "training.callbacks=[peer_turns:Turns]", f"hydra.run.dir={folder}/run",
                *options.extra.split(),
            ]
        )  # fmt: skip
    sys.exit(code)


def train_transformers(case: Case, tokens: Path, options: argparse.Namespace) -> None:
    """Train with transformers: autocast, sdpa, fused AdamW, torch.compile."""
    import torch
    import transformers

    kind, arguments = case.peer
    config = getattr(transformers, kind)(**arguments)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to("cuda", torch.float32).train()
    params = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def loss_of(rows: Any) -> Any:
        logits = model(input_ids=rows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten()
        )

    # The loss is compiled too: otherwise the logits are held in float32.
    compiled = torch.compile(loss_of)
    stored = np.load(tokens, mmap_mode="r")
    order = np.random.default_rng(0)

    def update() -> Any:
        starts = order.integers(0, len(stored) - case.length - 1, case.rows)
        rows = np.stack([stored[s : s + case.length + 1] for s in starts]).astype(np.int64)
        batch = torch.from_numpy(rows).pin_memory().to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    update().item()
    tell(first_update=since_start())
    for _ in range(3):
        update().item()
    torch.cuda.reset_peak_memory_stats()
    while told_to_go():
        start = time.perf_counter()
        for _ in range(options.updates):
            loss = update()
        value = loss.item()
        tell(
            seconds=time.perf_counter() - start,
            updates=options.updates,
            peak=torch.cuda.max_memory_allocated(),
            loss=value,
            parameters=params,
        )


def matmul_peak(size: int = 8192, times: int = 50) -> float:
    """Return the FLOP/s of a large bf16 product, measured in a process of its own."""
    code = (
        "import torch, time\n"
        f"a, b = (torch.randn({size}, {size}, device='cuda', dtype=torch.bfloat16) for _ in 'ab')\n"
        "for _ in range(10): a @ b\n"
        "torch.cuda.synchronize(); start = time.perf_counter()\n"
        f"for _ in range({times}): a @ b\n"
        "torch.cuda.synchronize(); print(time.perf_counter() - start)\n"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return 2 * size**3 * times / float(found)


def gpu_name() -> str:
    """Return the name of the GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
