"""Compares the losses of GPT-2 trained with kernels and without, on one GPU.

GPT-2 124M trains in bf16 on the same rows from the same seed with kernels=auto, kernels=xla and
kernels=none. Rounding differs between them, and training amplifies it. How much rounding alone can
do is measured by controls: kernels=none with the rows of every batch in another order, which
changes nothing but the order of sums. The tokens follow a random chain, so that the loss falls.

Judged over all steps, where d is the difference of a run's loss to that of kernels=none:
the largest |d| of auto and xla is at most twice the largest of the controls, and the mean |d| is at
most 1.5 times the mean of the control with the larger one. A run in float32 without kernels shows
which of them are closer to exact arithmetic; nothing is asked of that.

    python benchmarks/gpu_losses.py [--steps 100] [--without-float32]
    python benchmarks/gpu_losses.py --nano --steps 10    # on a CPU, not recorded
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import jax
import numpy as np
import optax
from gpu_peers import gpu_name
from record import verdict, write_record

import meshwright as mw
from meshwright.models import build_model
from meshwright.tasks import find_task

LARGEST, MEAN = 2.0, 1.5
KINDS, SUCCESSORS = 4096, 16
"""Tokens that occur, and tokens that may follow one."""
SIZES: dict[str, Any] = {"vocab_size": 50304, "context_length": 1024, "num_blocks": 12,
                         "hidden_size": 768, "num_heads": 12}  # fmt: skip
NANO = SIZES | {"vocab_size": 8192, "context_length": 64, "num_blocks": 2, "hidden_size": 64,
                "num_heads": 4}  # fmt: skip


class Chain:
    """Batches of a random chain: each token has a few successors, the first the most likely."""

    def __init__(self, rows: int, length: int, order: int | None = None) -> None:
        self.rows, self.length, self.order = rows, length, order
        self.successors = np.random.default_rng(7).integers(0, KINDS, (KINDS, SUCCESSORS))
        weights = 1 / np.arange(1, SUCCESSORS + 1)
        self.chances = np.cumsum(weights / weights.sum())

    def __call__(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """Return the batch of a step; `order` is the seed of the order of its rows."""
        random = np.random.default_rng((11, step))
        tokens = np.empty((batch_size, self.length + 1), np.int32)
        tokens[:, 0] = random.integers(0, KINDS, batch_size)
        drawn = random.random(tokens.shape)
        choices = np.minimum(np.searchsorted(self.chances, drawn), SUCCESSORS - 1)
        for at in range(self.length):
            tokens[:, at + 1] = self.successors[tokens[:, at], choices[:, at]]
        if self.order is not None:
            tokens = tokens[np.random.default_rng((self.order, step)).permutation(batch_size)]
        return {"tokens": tokens}


def losses(
    sizes: dict[str, Any],
    steps: int,
    kernels: str,
    order: int | None = None,
    precision: str = "bf16",
) -> np.ndarray:
    """Return the loss of every step."""
    found: dict[int, float] = {}
    rows = 8 if sizes is NANO else 32
    trainer = mw.Trainer(
        model=lambda rngs: build_model("gpt", rngs=rngs, dropout=0.0, **sizes),
        loss=find_task("language_modeling")().loss,
        optimizer=optax.adamw(6e-4, b2=0.95, weight_decay=0.1),
        clip_norm=1.0,
        precision=precision,  # pyright: ignore[reportArgumentType]
        kernels=kernels,  # pyright: ignore[reportArgumentType]
        log_every=1,
        seed=0,
        mesh="data=1",
        devices=jax.devices()[:1],
    )
    trainer.fit(
        Chain(rows, sizes["context_length"], order),
        steps=steps,
        batch_size=rows,
        on_metrics=lambda step, values: found.update({step: values["loss"]}),
        progress=False,
    )
    del trainer
    gc.collect()
    return np.array([found[n] for n in range(1, steps + 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", "--updates", type=int, default=100)
    parser.add_argument("--without-float32", action="store_true", help="leave that run out")
    parser.add_argument("--nano", action="store_true", help="a tiny model, for trying it out")
    options = parser.parse_args()
    sizes = NANO if options.nano else SIZES
    runs: dict[str, tuple[Any, ...]] = {"none": ("none",), "auto": ("auto",), "xla": ("xla",)}
    runs |= {f"none, other order {n}": ("none", n) for n in (1, 2)}
    if not options.without_float32:
        runs["none, float32"] = ("none", None, "no")
    curves: dict[str, np.ndarray] = {}
    for name, how in runs.items():
        curves[name] = losses(sizes, options.steps, *how)
        print(f"{name}: {curves[name][0]:.4f} → {curves[name][-1]:.4f}", flush=True)
    plain = curves["none"]
    assert plain[-1] < plain[0] - 0.01, "the loss does not fall: nothing is learned"
    figures = differences(curves)
    targets = judge(figures)
    print(*figures.items(), sep="\n")
    print(*(f"{what}: {found}" for what, found in targets.items()), sep="\n")
    if gpu_name() and not options.nano:
        steps = sorted({0, *range(9, options.steps, 10)})
        shown = {k: {n + 1: round(float(v[n]), 5) for n in steps} for k, v in curves.items()}
        record = {"gpu": gpu_name(), "updates": options.steps, "differences": figures}
        write_record("gpu_losses", record | {"losses": shown, "targets": targets})
    missed = [what for what, found in targets.items() if found.startswith("missed")]
    assert not missed or options.nano, f"farther apart than rounding explains: {missed}"


def differences(curves: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return how far each run is from kernels=none, and from float32."""
    exact = curves.get("none, float32")
    figures: dict[str, dict[str, float]] = {}
    for name, curve in curves.items():
        apart = np.abs(curve - curves["none"])
        figures[name] = {"largest": float(apart.max()), "mean": float(apart.mean())}
        if exact is not None:
            figures[name]["mean_from_float32"] = float(np.abs(curve - exact).mean())
        figures[name]["last_loss"] = float(curve[-1])
    return figures


def judge(figures: dict[str, dict[str, float]]) -> dict[str, str]:
    """Compare the differences of the kernels with those of the controls."""
    controls = [found for name, found in figures.items() if "other order" in name]
    targets: dict[str, str] = {}
    for name in ("auto", "xla"):
        for what, limit in {"largest": LARGEST, "mean": MEAN}.items():
            most = max(found[what] for found in controls)
            ratio = figures[name][what] / max(most, 1e-12)
            targets[f"kernels={name}: {what} difference at most {limit} × the controls'"] = (
                f"{verdict(ratio, limit)} ({ratio:.2f})"
            )
    return targets


if __name__ == "__main__":
    main()
