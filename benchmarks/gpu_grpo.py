"""Compares updates that learn from rewards with the same loop around transformers, on one GPU.

Gemma 3 1B with random weights in bf16, 64 prompts of 128 tokens, 8 completions of 256 tokens each,
temperature 0.9, top-k 50, the KL divergence from a reference, AdamW. With LoRA of rank 16 on every
linear layer the reference is the model without its adapters, else a frozen copy. The peer is
written by hand: transformers' generate with its static, compiled cache or its dynamic one,
whichever is faster here, by a copy of the model with merged adapters; layers and log-probabilities
under torch.compile, in parts of 16 rows like ours. Rows are shorter than Gemma's windows, so that
the peer's layers are all of full attention: its static cache of windows compiles anew for every
token. Each side runs in a process of its own; the first updates compile. vLLM is not compared.
Sides that were measured before on the same GPU stay in the record.

How far the probabilities of sampling and of training are apart depends on the model: `full` first
trains it on the pages of docs/, byte by byte, and then learns from rewards on their lines.

    python benchmarks/gpu_grpo.py [--updates 6] [--sides lora,full,peer_lora,peer_full]
    python benchmarks/gpu_grpo.py --tiny    # on a CPU, not recorded

PEER_PYTHON names an interpreter with PyTorch if this one has none.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gpu_lora import RANK, TINY, with_adapters
from gpu_peers import gpu_name
from peer_cases import GEMMA_1B
from record import read_record, verdict, write_record

SIDES = ("lora", "full", "peer_lora", "peer_full")
OF_PEER = 0.5
"""The time of an update over the peer's, at most."""
MISMATCH = 1e-3
"""The mean k3 of a token between sampling and training, at most, after a fine-tune."""
COMPILING = 2
"""The first updates, which compile programs, are not counted."""
CACHES = ("static", "static", "dynamic")
"""The caches of the peer's first updates; the faster one serves the others."""
PARTS = ("rollout", "reward", "log_probs", "update")


def sizes(tiny: bool) -> dict[str, int]:
    """Return prompts, completions of each, tokens of both, and the rows of a microbatch."""
    counts = (2, 4, 8, 8, 4) if tiny else (64, 8, 128, 256, 16)
    return dict(zip(("prompts", "samples", "length", "new", "rows"), counts, strict=True))


def even(completion: str | list[int]) -> float:
    """Return the share of even tokens or characters: something to learn."""
    numbers = [ord(each) if isinstance(each, str) else each for each in completion]
    return sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=6, help=f"the first {COMPILING} compile")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--tiny", action="store_true", help="a tiny Gemma 3, for CPUs")
    parser.add_argument("--peer", default="", help="for processes of this script")
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(peer(options.peer == "peer_lora", options.updates, options.tiny)))
        return
    found: dict[str, Any] = {}
    for side in options.sides.split(","):
        run = run_peer if side.startswith("peer") else run_ours
        found[side] = run(side, options.updates, options.tiny)
        print(side, json.dumps(found[side]), flush=True)
    targets: dict[str, str] = {}
    known = read_record("gpu_grpo")
    if known.get("gpu") == gpu_name() and not options.tiny:
        found = known.get("sides", {}) | found
    for side in ("lora", "full"):
        if {side, f"peer_{side}"} <= set(found):
            ratio = found[side]["seconds"] / found[f"peer_{side}"]["seconds"]
            what = f"{side}: at most {OF_PEER} × the peer's time"
            targets[what] = f"{verdict(ratio, OF_PEER)} ({ratio:.2f})"
            print(what, targets[what], flush=True)
    if "full" in found:
        apart, what = (
            found["full"]["mismatch"],
            f"after a fine-tune: mismatch of at most {MISMATCH}",
        )
        targets[what] = f"{verdict(apart, MISMATCH)} ({apart:.2g})"
        print(what, targets[what], flush=True)
    if gpu_name() and not options.tiny:
        write_record("gpu_grpo", {"gpu": gpu_name(), "sides": found, "targets": targets})


def prompts(tiny: bool, count: int) -> Any:
    """Return random prompts."""
    vocabulary = 256 if tiny else GEMMA_1B["vocab_size"]
    return np.random.default_rng(0).integers(5, vocabulary, (count, sizes(tiny)["length"]))


def run_ours(side: str, updates: int, tiny: bool) -> dict[str, Any]:
    """Train by the command line, and return what its metrics say."""
    own = sizes(tiny)
    with tempfile.TemporaryDirectory() as folder:
        file, run, more = Path(folder) / "prompts.jsonl", Path(folder) / "run", list[str]()
        given: list[Any] = prompts(tiny, own["prompts"] * updates).tolist()
        if side == "full":
            given, more = fine_tuned(Path(folder), own["prompts"] * updates, tiny)
        file.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in given))
        words = [
            "task=grpo", "data=prompts", f"data.path={file}", "grpo.rewards=[gpu_grpo:even]",
            f"grpo.num_generations={own['samples']}", "generation.eos_tokens=[]",
            f"generation.max_prompt_length={own['length']}",
            f"generation.max_generation_steps={own['new']}",
            f"training.global_batch_size={own['prompts'] * own['samples']}",
            f"training.micro_batch_size={own['rows']}", f"training.steps={updates}",
            "tracking.log_every=1", "checkpoint.enabled=false", *more,
            *([f"lora.rank={RANK}", "lora.base_dtype=bfloat16"] if side == "lora" else []),
        ]  # fmt: skip
        train(run, words, tiny)
        lines = (run / "metrics.jsonl").read_text().splitlines()
    return figures_of([json.loads(line) for line in lines])


def fine_tuned(folder: Path, count: int, tiny: bool) -> tuple[list[str], list[str]]:
    """Train on the pages of the documentation; return prompts, and where to start."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    # Each character is a token then.
    text = "\n".join(page.read_text() for page in pages).encode("ascii", "ignore").decode()
    (folder / "pages.txt").write_text(text)
    words = [
        "data=text", f"data.path={folder / 'pages.txt'}", "training.global_batch_size=16",
        f"data.sequence_length={64 if tiny else 512}", f"training.steps={4 if tiny else 150}",
        "checkpoint.every=100", "training.sample_tokens=0",
    ]  # fmt: skip
    train(folder / "start", words, tiny)
    length = sizes(tiny)["length"]
    prompts = [text[300 * n : 300 * n + length] for n in range(count)]
    return prompts, [f"model.init_from={folder / 'start'}"]


def train(run: Path, words: list[str], tiny: bool) -> None:
    """Train Gemma 3."""
    settings = [
        f"model={'gemma3_tiny' if tiny else 'gemma3_1b'}", "data.eval_fraction=0",
        f"hydra.run.dir={run}", *([] if tiny else ["training.mixed_precision=bf16"]),
    ]  # fmt: skip
    here = str(Path(__file__).parent)
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-m", "meshwright", "train", *settings, *words],
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def figures_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a run's updates, and their parts."""

    def median(split: str, name: str) -> float:
        values = [line[name] for line in lines if line["split"] == split and name in line]
        return statistics.median(values[COMPILING:])

    named = {"rollout": "rollout", "reward": "reward", "log_probs": "log_prob"}
    parts = {part: median("rollout", f"{name}_seconds") for part, name in named.items()}
    seconds = median("train", "step_seconds")
    found = {
        **parts,
        "update": seconds - sum(parts.values()),
        "seconds": seconds,
        "tokens_per_second": median("rollout", "rollout_tokens_per_second"),
        "mismatch": median("train", "mismatch"),
        "entropy": median("train", "entropy"),
    }
    memory = [line["memory_bytes"] / 2**30 for line in lines if "memory_bytes" in line]
    found["peak_gib"] = max(memory, default=0.0)
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def run_peer(side: str, updates: int, tiny: bool) -> dict[str, Any]:
    """Run the peer in a process of its own."""
    command = [os.environ.get("PEER_PYTHON", sys.executable), __file__, "--peer", side]
    command += ["--updates", str(updates), *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def peer(adapted: bool, updates: int, tiny: bool) -> dict[str, Any]:
    """Learn from rewards with transformers, and return what an update takes, with its parts."""
    import torch
    import transformers

    loop = Peer(adapted, tiny)
    own, device = loop.own, loop.device
    rows = torch.from_numpy(prompts(tiny, own["prompts"] * updates)).to(device)
    found: list[dict[str, float]] = []
    rollouts: dict[str, float] = {}
    for number, asked in enumerate(rows.split(own["prompts"])):
        loop.cache = (
            CACHES[number] if number < len(CACHES) else min(rollouts, key=rollouts.__getitem__)
        )
        moments = [moment(device)]
        tokens = loop.complete(asked.repeat_interleave(own["samples"], 0))
        moments.append(moment(device))
        advantages = loop.advantages(tokens)
        moments.append(moment(device))
        known = loop.known(tokens)
        moments.append(moment(device))
        loop.learn(tokens, advantages, known)
        moments.append(moment(device))
        spent = [after - before for before, after in pairwise(moments)]
        found.append(dict(zip(PARTS, spent, strict=True)) | {"seconds": sum(spent)})
        if number < len(CACHES):
            rollouts[loop.cache] = spent[0]
        print(f"update {number}, {loop.cache} cache:", found[-1], file=sys.stderr, flush=True)
    row: dict[str, Any] = {
        key: float(f"{statistics.median(one[key] for one in found[len(CACHES) :]):.4g}")
        for key in found[0]
    }
    row["cache"], row["rollouts"] = loop.cache, rollouts
    row["tokens_per_second"] = round(own["prompts"] * own["samples"] * own["new"] / row["rollout"])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    row["peak_gib"] = round(peak / 2**30, 1)
    row["versions"] = f"transformers {transformers.__version__}, PyTorch {torch.__version__}"
    return row


class Peer:
    """The loop around transformers."""

    def __init__(self, adapted: bool, tiny: bool) -> None:
        import torch
        import transformers

        self.own = sizes(tiny)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        backend = "inductor" if self.device == "cuda" else "eager"
        small = {**TINY, "query_pre_attn_scalar": 64} if tiny else {}
        sizes_of = {**GEMMA_1B, **small}
        kinds = ["full_attention"] * sizes_of["num_hidden_layers"]
        config = transformers.Gemma3TextConfig(**sizes_of, layer_types=kinds)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(config)
        self.model, self.cache = model.to(self.device, torch.bfloat16), ""
        # Completes prompts with the weights of the model, adapters merged into them.
        self.sampler = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.reference = None if adapted else copy.deepcopy(self.sampler)
        self.plain = self.model
        if adapted:
            self.model = with_adapters(self.model)[0].to(self.device)
            self.plain = self.model.get_base_model()
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        fused = self.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-6, fused=fused)
        # All layers are alike, so one is compiled for all.
        for one in (self.plain, self.reference):
            for layer in one.model.layers if one is not None else ():
                layer.compile(backend=backend)
        self.compiled = torch.compile(self.of_hidden, backend=backend)

    def complete(self, asked: Any) -> Any:
        """Return prompts with completions that were sampled."""
        import torch

        how = {"cache_implementation": "static"} if self.cache == "static" else {}
        adapted = self.plain is not self.model
        if adapted:
            self.model.merge_adapter()
        given = self.plain.state_dict()
        with torch.no_grad():
            for name, weight in self.sampler.state_dict().items():
                known = name if name in given else name.replace(".weight", ".base_layer.weight")
                weight.copy_(given[known])
            if adapted:
                self.model.unmerge_adapter()
            tokens = self.sampler.generate(
                input_ids=asked, attention_mask=torch.ones_like(asked), do_sample=True,
                max_new_tokens=self.own["new"], min_new_tokens=self.own["new"], temperature=0.9,
                top_k=50, top_p=1.0, pad_token_id=0, use_cache=True, **how,
            )  # fmt: skip
        return tokens.clone()

    def advantages(self, tokens: Any) -> Any:
        """Return the rewards relative to those of the same prompt."""
        import torch

        rewards = [even(row) for row in tokens[:, self.own["length"] :].tolist()]
        grouped = torch.tensor(rewards, device=self.device).view(-1, self.own["samples"])
        centred = grouped - grouped.mean(1, keepdim=True)
        return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()

    def known(self, tokens: Any) -> list[Any]:
        """Return the log-probabilities of the reference."""
        import torch

        parts = tokens.split(self.own["rows"])
        with torch.no_grad():
            if self.reference is not None:
                return [self.log_probs(self.reference, part) for part in parts]
            with self.model.disable_adapter():
                return [self.log_probs(self.plain, part) for part in parts]

    def log_probs(self, model: Any, tokens: Any) -> Any:
        """Return the log-probabilities of completions."""
        import torch

        length = self.own["length"]
        with torch.autocast(self.device, dtype=torch.bfloat16):
            hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            return self.compiled(model.lm_head.weight, hidden[:, length - 1 :], tokens[:, length:])

    @staticmethod
    def of_hidden(weight: Any, hidden: Any, tokens: Any) -> Any:
        """Return the log-probabilities of tokens."""
        import torch

        logits = torch.nn.functional.linear(hidden, weight)
        return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]

    def learn(self, tokens: Any, advantages: Any, known: list[Any]) -> None:
        """Make one update, in parts."""
        import torch

        parts = (tensor.split(self.own["rows"]) for tensor in (tokens, advantages))
        for part, advantage, base in zip(*parts, known, strict=True):
            new = self.log_probs(self.plain, part)
            # One update for each rollout: the model that sampled is the one that learns.
            ratio, scaled = torch.exp(new - new.detach()), advantage[:, None]
            clipped = torch.clamp(ratio, 0.8, 1.2) * scaled
            k3 = torch.exp(base - new) - (base - new) - 1
            losses = 0.08 * k3 - torch.minimum(ratio * scaled, clipped)
            (losses.sum() / (len(tokens) * self.own["new"])).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def moment(device: str) -> float:
    """Return the time when all that was started is done."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
