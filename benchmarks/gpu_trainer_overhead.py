"""Measures what the trainer adds to the step of GPT-2 124M on one GPU; see trainer_overhead.py.

32 rows of 1024 tokens, bf16, AdamW, clipping. Trainer and bare step alternate in one process.

    python benchmarks/gpu_trainer_overhead.py [--pairs 10] [--block 100]
    python benchmarks/gpu_trainer_overhead.py --nano --pairs 2 --block 4    # on a CPU, not recorded
"""

from __future__ import annotations

import argparse

import jax
import optax
from gpu_losses import NANO, SIZES
from gpu_peers import gpu_name
from record import write_record
from trainer_overhead import LOG_EVERY, Work, report

import meshwright as mw
from meshwright.models import build_model
from meshwright.tasks import find_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--block", type=int, default=100, help="steps of a turn")
    parser.add_argument("--nano", action="store_true", help="a tiny model, for trying it out")
    options = parser.parse_args()
    sizes, rows = (NANO, 8) if options.nano else (SIZES, 32)
    shape = {name: sizes[name] for name in ("vocab_size", "context_length")}
    task = find_task("language_modeling")(**shape)
    trainer = mw.Trainer(
        model=lambda rngs: build_model("gpt", rngs=rngs, dropout=0.0, **sizes),
        loss=task.loss,
        optimizer=optax.adamw(1e-4),
        clip_norm=1.0,
        precision="bf16",
        log_every=LOG_EVERY,
        mesh="data=1",
        devices=jax.devices()[:1],
    )
    batch = task.synthetic_batch(0, rows)
    figures = report(Work(trainer, batch, pairs=options.pairs, block=options.block))
    if gpu_name() and not options.nano:
        write_record("gpu_trainer_overhead", {"gpu": gpu_name(), **figures})


if __name__ == "__main__":
    main()
