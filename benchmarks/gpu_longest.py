"""Finds the longest row with which Llama 3 1B trains on one GPU, ours and that of transformers.

One row a batch, float32 weights, AdamW, bf16 compute. Ours recomputes blocks: what its programs
need is linear in the length, so two are compiled, and then the longest that fits. Two steps run at
the first length. A step of the longest is begun: a program allocates all it needs before its first
kernel. It takes minutes, most of them for attention, and is not waited for without --to-the-end.

The peer checkpoints its blocks (sdpa, bf16 autocast, fused AdamW, a compiled loss). It tries
lengths until one does not fit.

    python benchmarks/gpu_longest.py --side meshwright
    python benchmarks/gpu_longest.py --side compiled    # ours for an H200 that is not here
    python benchmarks/gpu_longest.py --side transformers
    python benchmarks/gpu_longest.py --side meshwright --tiny    # on a CPU, not recorded
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

STEP = 8192
"""Lengths are multiples of it."""
FIRST = {"meshwright": 131072, "transformers": 32768}
SHARE, H200_BYTES = 0.95, 149_557_477_376
"""What JAX takes of a GPU's memory here, and that of an H200."""
TINY_STEP, TINY_FIRST, TINY_CAPACITY = 128, 256, {"meshwright": 160 * 2**20, "transformers": 1024}
"""With --tiny; what the peer has is a length, because CPUs do not tell what it holds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--to-the-end", action="store_true", help="wait for the longest step")
    options = parser.parse_args()
    # By default JAX leaves a quarter of the memory to others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(SHARE))
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    row = {"side": options.side, **SIDES[options.side](options)}
    print(json.dumps(row), flush=True)
    if not options.tiny:
        record(row)
    # A step that was begun is not waited for.
    os._exit(0)


def record(row: dict[str, Any]) -> None:
    """Write the record: this side, and the other one as it was."""
    from gpu_peers import gpu_name
    from record import read_record, write_record

    before = read_record("gpu_longest")
    kept = [r for r in before.get("rows", []) if r["side"] != row["side"]]
    rows = sorted([*kept, row], key=lambda row: row["side"])
    gpu = gpu_name() or before.get("gpu", "")
    write_record("gpu_longest", {"gpu": gpu, "model": "llama3_1b", "rows": rows})


def longest(bytes_at: dict[int, int], capacity: int, step: int) -> int:
    """Return the longest row that fits, if memory is linear in the length."""
    (short, low), (long, high) = sorted(bytes_at.items())[-2:]
    slope = (high - low) / (long - short)
    return int((capacity - low) / slope + short) // step * step


def say(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def tokens_file(length: int) -> Path:
    """Return a file with the tokens of one row."""
    path = Path(tempfile.gettempdir()) / f"gpu_longest_{length}.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, length + 1).astype(np.uint16))
    return path


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Return our longest row, and how steps took."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    capacity = TINY_CAPACITY["meshwright"] if options.tiny else stats["bytes_limit"]
    step, first = (TINY_STEP, TINY_FIRST) if options.tiny else (STEP, FIRST["meshwright"])
    programs = {first: Program(first, options.tiny)}
    state = programs[first].assembled.init(seed=0)
    state, ran = programs[first].run(state, 2)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    say(length=first, seconds=ran, peak_bytes=peak, compiled_bytes=programs[first].bytes)
    programs[2 * first] = Program(2 * first, options.tiny)
    sizes = {length: program.bytes for length, program in programs.items()}
    found = longest(sizes, capacity, step)
    del state
    while True:
        program = Program(found, options.tiny)
        sizes[found] = program.bytes
        if program.bytes > capacity:
            found = min(longest(sizes, capacity, step), found - step)
            continue
        try:
            begun = program.begin(wait=options.to_the_end or options.tiny)
            break
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # The memory that is free is not in one piece.
            say(length=found, refused=str(error)[:200])
            found -= 4 * step
    return {
        "longest": found,
        "with": f"JAX {version('jax')}",
        "capacity_bytes": capacity,
        "compiled_bytes": sizes,
        "predicted_bytes": program.predicted(),
        "ran": {"length": first, "step_seconds": ran[-1], "peak_bytes": peak},
        **begun,
    }


def compiled(options: argparse.Namespace) -> dict[str, Any]:
    """Return the longest row whose step, compiled for an H200, needs no more than it has."""
    capacity = int(SHARE * H200_BYTES)
    sizes = {length: rehearsed(length) for length in (262144, 524288)}
    found = longest(sizes, capacity, STEP)
    while sizes.setdefault(found, rehearsed(found)) > capacity:
        found -= STEP
    jax = f"JAX {version('jax')}"
    return {"longest": found, "capacity_bytes": capacity, "compiled_bytes": sizes, "with": jax}


def rehearsed(length: int) -> int:
    """Return what `meshwright rehearse` says that a step needs on an H200."""
    words = [*settings(length, tiny=False), "hardware=1xH200", "--memory-share", "1", "--json"]
    command = [sys.executable, "-m", "meshwright", "rehearse", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    total = json.loads(done.stdout)["memory"]["total_bytes"]
    say(length=length, bytes=total)
    return total


def settings(length: int, *, tiny: bool) -> list[str]:
    """Return the config of a training on one row of this length."""
    return [
        f"model={'llama3_tiny' if tiny else 'llama3_1b'}", f"model.context_length={length}",
        f"data.sequence_length={length}", "data=tokens", f"data.path={tokens_file(length)}",
        "data.eval_fraction=0", "training.global_batch_size=1", "precision=bf16",
        "sharding.remat=full", "sharding.blocks=scan",
    ]  # fmt: skip


class Program:
    """A step for rows of some length, compiled."""

    def __init__(self, length: int, tiny: bool) -> None:
        from meshwright.compiled.memory import memory_of
        from meshwright.config.compose import compose_config, validate
        from meshwright.plan import make_plan
        from meshwright.planner.fit.fit_check import batch_shapes
        from meshwright.recipe import make_recipe

        config = validate(compose_config(settings(length, tiny=tiny)))
        started = time.perf_counter()
        self.length, self._plan = length, make_plan(config, 1)
        self._recipe = make_recipe(config, 1)
        shapes = self._recipe.example_batch(1)
        assert shapes["tokens"].shape == (1, length + 1), shapes
        self._batch = {"tokens": np.load(tokens_file(length))[None].astype(np.int32)}
        self.assembled = self._recipe.assemble(self._plan, shapes)
        self._compiled = self.assembled.step.lower(batch_shapes(self.assembled)).compile()
        self.bytes = memory_of(self._compiled).total
        say(length=length, bytes=self.bytes, compiled_in=time.perf_counter() - started)

    def predicted(self) -> int:
        """Return what the planner says that the program needs."""
        from meshwright.cli.auto_settings import recipe_estimator
        from meshwright.hardware import parse_hardware

        estimator = recipe_estimator(self._recipe, "bf16")
        return estimator.estimate(self._plan, parse_hardware("1xH200")).memory.compiled

    def run(self, state: Any, steps: int) -> tuple[Any, list[float]]:
        """Run some steps, and return the state and how long each took."""
        import jax

        batch, seconds = self.assembled.put_batch(self._batch), []
        for _ in range(steps):
            started = time.perf_counter()
            state, metrics = self._compiled(state, batch)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - started)
        return state, seconds

    def begin(self, *, wait: bool) -> dict[str, Any]:
        """Begin a step, and return what the device holds then."""
        import jax

        state = self.assembled.init(seed=0)
        if wait:
            _, (seconds,) = self.run(state, 1)
        else:
            seconds = None
            begun = self._compiled(state, self.assembled.put_batch(self._batch))
            time.sleep(3)
            # A program that did not fit would be ready, with an error.
            if all(leaf.is_ready() for leaf in jax.tree.leaves(begun)):
                jax.block_until_ready(begun)
        stats = jax.local_devices()[0].memory_stats() or {}
        peak = {"begun_peak_bytes": stats.get("peak_bytes_in_use", 0)}
        return peak | ({"longest_step_seconds": seconds} if wait else {})


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """Return the longest row of transformers, and how steps took."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    capacity = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    step, first = (TINY_STEP, TINY_FIRST) if options.tiny else (STEP, FIRST["transformers"])
    train = peer_step(device, options.tiny)
    tried: dict[int, dict[str, Any] | None] = {}

    def fits(length: int) -> bool:
        if length not in tried:
            tried[length] = attempt(train, length, device, options.tiny)
            say(length=length, **(tried[length] or {"refused": "out of memory"}))
        return tried[length] is not None

    for length in (first, 2 * first):
        fits(length)
    peaks = {length: row["peak_bytes"] for length, row in tried.items() if row}
    found = longest(peaks, capacity, step) if device == "cuda" else 4 * first
    while not fits(found):
        found -= step
    while fits(found + step):
        found += step
    row = tried[found]
    assert row is not None
    refused = [length for length, row in tried.items() if row is None]
    packages = f"transformers {version('transformers')}, PyTorch {torch.__version__}"
    found_here = {"longest": found, "capacity_bytes": capacity, "refused": min(refused)}
    return {**found_here, **row, "with": packages}


def peer_step(device: str, tiny: bool) -> Callable[[int], float]:
    """Return what trains transformers' model on a row of some length, and returns the loss."""
    import torch
    from peer_cases import CASES
    from peer_torch import build_model
    from torch.nn.functional import cross_entropy

    case = CASES["llama3_1b"]
    assert case.peer is not None
    kind, sizes = case.peer
    small = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256, "head_dim": 8}
    sizes = sizes | {"max_position_embeddings": 2**20} | (small if tiny else {})
    with torch.device(device):
        model = build_model(replace(case, peer=(kind, sizes)), "transformers", "sdpa")
    model = model.to(torch.float32).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")

    def of_logits(logits: Any, targets: Any) -> Any:
        return cross_entropy(logits.float(), targets)

    if device == "cuda":
        # Otherwise the logits are held in float32.
        of_logits = torch.compile(of_logits, dynamic=True)

    def train(length: int) -> float:
        tokens = torch.randint(0, sizes["vocab_size"], (1, length + 1), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1]).logits
            loss = of_logits(logits.flatten(0, 1), tokens[:, 1:].flatten())
            del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return train


def attempt(
    train: Callable[[int], float], length: int, device: str, tiny: bool
) -> dict[str, Any] | None:
    """Train two steps on rows of some length; None if the memory does not suffice."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        if tiny and length > TINY_CAPACITY["transformers"]:
            raise torch.OutOfMemoryError
        train(length)
        started = time.perf_counter()
        loss = train(length)
    except torch.OutOfMemoryError:
        return None
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"step_seconds": time.perf_counter() - started, "peak_bytes": peak, "loss": loss}


SIDES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "meshwright": ours,
    "compiled": compiled,
    "transformers": peer,
}


if __name__ == "__main__":
    main()
