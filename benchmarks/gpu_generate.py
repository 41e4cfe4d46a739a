"""Compares generation from our Llama 3 1B and from a user's decoder with other ways, on one GPU.

Greedy, bf16, random weights, 256 tokens after prompts of 256, 64 rows and 1 row: plain JAX with a
cache written by hand, transformers with its dynamic and with its static, compiled cache, and
`mw.generate` for our Llama 3 1B, for a decoder of the same shape as users write it, and for Gemma 3
1B. Each runs in a process of its own. Tokens per second count new tokens, and the time includes the
prompts. The limit is how fast the GPU can read the weights and the mean cache once per token.

    python benchmarks/gpu_generate.py [--only ours,hand]
    python benchmarks/gpu_generate.py --tiny    # on a CPU, not recorded
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gpu_peers import gpu_name
from record import verdict, write_record

LLAMA: dict[str, Any] = {"vocab_size": 128256, "context_length": 131072, "num_blocks": 16,
    "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "mlp_size": 8192,
    "rope_base": 500000.0}  # fmt: skip
GEMMA: dict[str, Any] = {"vocab_size": 262144, "context_length": 32768, "num_blocks": 26,
    "hidden_size": 1152, "num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "mlp_size": 6912,
    "sliding_window": 512, "global_every": 6, "query_scale": 256}  # fmt: skip
TINY: dict[str, Any] = {"vocab_size": 256, "context_length": 512, "num_blocks": 2,
    "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "mlp_size": 128}  # fmt: skip
PROMPT, NEW = 256, 256
SIDES = {"hand": (64, 1), "ours": (64, 1), "user": (64, 1), "gemma": (64,), "static": (64,),
         "dynamic": (64,)}  # fmt: skip
"""What is measured, and with how many rows."""
BANDWIDTH = 4.8e12
"""Bytes per second that an H200 reads."""
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SIDES), help="which, by name")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for trying it out")
    parser.add_argument("--side", default="", help="for processes of this script")
    options = parser.parse_args()
    if options.side:
        measure = measure_torch if options.side in ("dynamic", "static") else measure_jax
        print(json.dumps(measure(options.side, options.tiny)), flush=True)
        return
    rows: list[dict[str, Any]] = []
    for side in options.only.split(","):
        rows += run_side(side, tiny=options.tiny)
    whole = {row["side"] for row in rows} == set(SIDES)
    if gpu_name() and not options.tiny and whole:
        note = "transformers " + next(r["version"] for r in rows if r["side"] == "static")
        figures = {"gpu": gpu_name(), "rows": rows, "targets": judge(rows)}
        write_record("gpu_generate", figures, note=note)
        print(*figures["targets"].items(), sep="\n")


def run_side(side: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Measure one side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        print(f"{side}: failed with exit code {done.returncode}", flush=True)
        return []
    rows = json.loads(lines[-1])
    for row in rows:
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of the first call, and the median of later ones."""
    seconds: list[float] = []
    for _ in range(1 + TURNS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds[0], statistics.median(seconds[1:])


def figures(
    side: str, rows: int, new: int, cold: float, warm: float, peak: float
) -> dict[str, Any]:
    """Return one row of the record."""
    return {
        "side": side,
        "rows": rows,
        "tokens_per_second": round(rows * new / warm),
        "ms_per_token": round(1e3 * warm / new, 3),
        "first_call_s": round(cold, 1),
        "peak_gib": round(peak / 2**30, 2),
    }


def measure_jax(side: str, tiny: bool) -> list[dict[str, Any]]:
    """Measure what runs on JAX."""
    import jax
    import numpy as np

    prompt, new = (16, 16) if tiny else (PROMPT, NEW)
    sizes = {**(GEMMA if side == "gemma" else LLAMA), **(TINY if tiny else {})}
    tokens = np.random.default_rng(0).integers(0, sizes["vocab_size"], (64, prompt), np.int32)
    found: list[dict[str, Any]] = []
    make = hand_written if side == "hand" else meshwright
    generate, size = make(side, sizes, prompt, new)
    for rows in SIDES[side]:
        cold, warm = timed(lambda rows=rows: generate(tokens[:rows], new))
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        row = figures(side, rows, new, cold, warm, peak)
        cache = 2 * 2 * rows * sizes["num_blocks"] * sizes["num_kv_heads"] * sizes["head_dim"]
        limit = (size + cache * (prompt + new / 2)) / BANDWIDTH
        row |= {"limit_ms": round(1e3 * limit, 3), "of_limit": round(limit * new / warm, 3)}
        if side != "hand":
            row |= first_tokens(generate, tokens[:rows, : prompt - 1])
        found.append(row)
    return found


def first_tokens(generate: Callable[..., Any], tokens: Any) -> dict[str, float]:
    """Return the seconds to the first token, of a program that is compiled first and then not."""
    cold, warm = timed(lambda: generate(tokens, 1))
    return {"first_token_cold_s": round(cold, 2), "first_token_ms": round(1e3 * warm, 1)}


def hand_written(side: str, sizes: dict[str, Any], prompt: int, new: int) -> Any:
    """Return plain JAX's way to generate, and the bytes of its weights."""
    import jax
    from generate_models import HandWritten

    made = HandWritten(sizes, prompt, new)
    weights = made.weights()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    return (lambda tokens, new: jax.device_get(made.generate(weights, tokens))), size


def meshwright(side: str, sizes: dict[str, Any], prompt: int, new: int) -> Any:
    """Return `mw.generate` of a model, and the bytes of its weights."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from generate_models import UserDecoder

    import meshwright as mw
    from meshwright.models import build_model

    kinds: dict[str, Callable[..., Any]] = {
        "ours": lambda **given: build_model("llama3", **given),
        "gemma": lambda **given: build_model("gemma3", **given),
        "user": UserDecoder,
    }
    graphdef, state = nnx.split(nnx.eval_shape(lambda: kinds[side](**sizes, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(state)

    keys = jax.random.split(jax.random.key(0), len(leaves))
    filled = [
        0.02 * jax.random.normal(key, leaf.shape, jnp.bfloat16)
        if leaf.ndim > 1
        else jnp.ones(leaf.shape, jnp.bfloat16)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, filled))
    size = sum(leaf.nbytes for leaf in filled)

    def generate(tokens: Any, new: int) -> Any:
        got = mw.generate(model, tokens, max_new_tokens=new, dtype="bfloat16")
        assert got.num_tokens == len(tokens) * new
        assert not got.remarks, got.remarks
        return got

    return generate, size


def measure_torch(side: str, tiny: bool) -> list[dict[str, Any]]:
    """Measure transformers."""
    import torch
    import transformers

    sizes = {**LLAMA, **(TINY if tiny else {})}
    prompt, new = (16, 16) if tiny else (PROMPT, NEW)
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["mlp_size"],
        num_hidden_layers=sizes["num_blocks"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        tie_word_embeddings=True,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    how = {"cache_implementation": "static"} if side == "static" else {}
    found: list[dict[str, Any]] = []
    for rows in SIDES[side]:
        tokens = torch.randint(0, sizes["vocab_size"], (rows, prompt), device=device)

        def run(tokens: Any = tokens) -> Any:
            with torch.inference_mode():
                model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=False,
                    pad_token_id=0,
                    **how,
                ).cpu()

        run()
        cold, warm = timed(run)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        found.append(figures(side, rows, new, cold, warm, peak))
        found[-1]["version"] = f"{transformers.__version__}, PyTorch {torch.__version__}"
    return found


def judge(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Compare the figures with what is asked."""
    found = {(row["side"], row["rows"]): row for row in rows}

    def speed(*key: Any) -> float:
        return found[key]["tokens_per_second"]

    ratios = {
        "our Llama, 64 rows: at least 0.95 × plain JAX": (("ours", 64), ("hand", 64), 0.95),
        "a user's decoder, 64 rows: at least 0.95 × plain JAX": (("user", 64), ("hand", 64), 0.95),
        "our Llama, 64 rows: at least 3 × transformers compiled": (("ours", 64), ("static", 64), 3),
        "a user's decoder, 64 rows: at least 3 × transformers compiled": (
            ("user", 64), ("static", 64), 3,
        ),
        "our Llama, 1 row: at least 0.95 × plain JAX": (("ours", 1), ("hand", 1), 0.95),
    }  # fmt: skip
    targets: dict[str, str] = {}
    for what, (one, other, least) in ratios.items():
        ratio = speed(*one) / speed(*other)
        targets[what] = f"{verdict(ratio, least, at_most=False)} ({ratio:.3f})"
    share = found["gemma", 64]["of_limit"]
    what = "Gemma 3 1B, 64 rows: at least 40% of what memory allows"
    targets[what] = f"{verdict(share, 0.4, at_most=False)} ({share:.0%})"
    return targets


if __name__ == "__main__":
    # XLA's own choice of how much memory to reserve would hide how much is used.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
