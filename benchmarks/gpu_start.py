"""Measures how long `meshwright train` takes to the first step of GPT-2 124M on one GPU.

From the start of the process to the line that reports the step: imports, data and the ledger
included. The first run has an empty compilation cache, the others find what it has left there. As
in an installed package, the bytecode of all modules is there before. What JAX alone needs for the
first number is measured in turns with them.

One more run with a warm cache prints what its time goes into (`start_phases.py`).

A last run with another empty cache trains on, and evaluates at its end: its steps from the 10th on
are compared with the same steps of a run that finds its programs, to see what compiling the
evaluation takes from them.

    python benchmarks/gpu_start.py [--turns 3]
    python benchmarks/gpu_start.py --turns 2 --steps 0    # without the longer runs
    python benchmarks/gpu_start.py --nano --turns 1 --steps 20    # on a CPU, not recorded
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from gpu_peers import gpu_name
from record import verdict, write_record

COLD, WARM = 30.0, 8.0
"""Seconds to the first step, at most."""
BESIDE = 0.97
"""The least share of the speed that steps keep while the evaluation compiles."""
LONG = 110
VOCABULARY, LENGTH, ROWS = 50304, 1024, 32
SETTINGS = (
    *("model=gpt2", f"model.vocab_size={VOCABULARY}", "model.dropout=0"),
    *("data=tokens", f"data.sequence_length={LENGTH}", f"training.global_batch_size={ROWS}"),
    *("data.eval_fraction=0", "training.sample_tokens=0", "training.steps=1"),
    *("precision=bf16", "tracking.log_every=1", "checkpoint=none"),
)
NANO = ("model.hidden_size=48", "data.sequence_length=32", "training.global_batch_size=2",
        "compilation_cache=true")  # fmt: skip
BARE = """
import jax, jax.numpy as jnp
print(float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8)))))
"""
SUM = "512.0"
"""What it prints."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="runs with a warm cache")
    parser.add_argument("--steps", type=int, default=LONG, help="steps of the longer runs; 0: none")
    parser.add_argument("--nano", action="store_true", help="a tiny model, for trying it out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        draw = np.random.default_rng(0)
        np.save(tokens, draw.integers(0, VOCABULARY, 64 * ROWS * LENGTH).astype(np.uint16))
        command = [sys.executable, "-P", "-m", "meshwright", "train", *SETTINGS]
        command += [f"data.path={tokens}", *(NANO if options.nano else ())]
        env = {**os.environ, "XDG_CACHE_HOME": folder, "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        imports = "import meshwright.cli.main, meshwright.cli.request, meshwright.cli.train"
        subprocess.run([sys.executable, "-c", imports], env=env, check=True)
        warm, bare = list[float](), list[float]()
        cold = seconds_to("train 1/", [*command, f"hydra.run.dir={folder}/cold"], env)
        print(f"cold {cold:.1f} s", flush=True)
        for turn in range(options.turns):
            again = [*command, f"hydra.run.dir={folder}/warm{turn}"]
            warm.append(seconds_to("train 1/", again, env))
            bare.append(seconds_to(SUM, [sys.executable, "-c", BARE], env))
            print(f"warm {warm[-1]:.1f} s, JAX alone {bare[-1]:.1f} s", flush=True)
        phases = Path(__file__).with_name("start_phases.py")
        words = [sys.executable, "-P", str(phases), *command[command.index("train") :]]
        run = subprocess.run(
            [*words, f"hydra.run.dir={folder}/phases"],
            env=env,
            check=True,
            text=True,
            capture_output=True,
        )
        shown = [line for line in run.stderr.splitlines() if line.startswith("start: ")]
        print(*shown, sep="\n", flush=True)
        steps, crawl = options.steps, None
        if steps:
            command += ["data.eval_fraction=0.05", f"training.steps={steps}"]
            command.append("tracking.log_every=10")
            env["XDG_CACHE_HOME"] = f"{folder}/beside"
            crawl = [
                speeds(command, Path(folder) / name, env, steps) for name in ("first", "second")
            ]
            print(
                f"samples/s from step 20 to {steps}: {crawl[0]} cold, {crawl[1]} warm", flush=True
            )
    typical = statistics.median(warm)
    targets = {
        f"cold: at most {COLD:.0f} s": f"{verdict(cold, COLD)} ({cold:.1f} s)",
        f"warm: at most {WARM:.0f} s": f"{verdict(typical, WARM)} ({typical:.1f} s)",
    }
    if crawl is not None:
        kept = min(crawl[0]) / statistics.median(crawl[1])
        targets[f"steps beside a compiling evaluation: at least {BESIDE:.0%} of the speed"] = (
            f"{verdict(kept, BESIDE, at_most=False)} ({kept:.0%} in the slowest ten)"
        )
    print(targets)
    if gpu_name() and not options.nano:
        figures = {
            "cold": cold,
            "warm": warm,
            "jax_alone": bare,
            "beside": crawl,
            "phases": shown,
            "targets": targets,
        }
        write_record("gpu_start", {"gpu": gpu_name(), **figures})


def speeds(command: list[str], run: Path, env: dict[str, str], steps: int) -> list[float]:
    """Return the samples per second of every ten steps but the first."""
    seconds_to(f"train {steps}/", [*command, f"hydra.run.dir={run}"], env)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [e["samples_per_second"] for e in lines if e["split"] == "train" and e["step"] >= 20]


def seconds_to(beginning: str, command: list[str], env: dict[str, str]) -> float:
    """Return the seconds until a process prints a line that begins so."""
    begun, found = time.perf_counter(), None
    with subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found is None and line.startswith(beginning):
                found = time.perf_counter() - begun
    if process.returncode or found is None:
        sys.exit(f"failed: {' '.join(command)}")
    return found


if __name__ == "__main__":
    main()
