"""The two runs whose folders are kept in tests/fixtures: how they are started, and how made.

`python tests/older_runs.py FOLDER` makes them anew, which is only needed for a new format.
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshwright as mw
from meshwright.step.canonical import CanonicalForm

FIXTURES = Path(__file__).parent / "fixtures"
SAVED, RESUMED = 2, 4
"""Steps done when the fixtures were saved, and when their expected values were noted."""

GPT = [
    "model=gpt2_nano", "data=synthetic", "model.vocab_size=32", "model.context_length=8",
    "model.hidden_size=8", "model.num_heads=2", "sharding.blocks=scan",
    "sharding.min_shard_size=0", "optimizer=sgd", "optimizer.momentum=0.9",
    "optimizer.schedule=constant", "optimizer.warmup_steps=0", "training.global_batch_size=8",
    "training.eval_every=2", "training.eval_batches=2", "tracking.log_every=1",
    "checkpoint.every=2", "checkpoint.keep_last=1", "run.seed=3", "run.project=older_runs",
]  # fmt: skip
"""What the GPT was trained with, apart from mesh, length and folder."""


class Noisy(nnx.Module):
    """Batch statistics and dropout: a model with state beside its parameters."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def square_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def fit_noisy(folder, steps, *, mesh, count):
    """Train the small model, in fp16 so that checkpoints hold a loss scale."""
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    trainer = mw.Trainer(
        model=lambda rngs: Noisy(rngs),
        loss=square_loss,
        optimizer=optax.adamw(0.01),
        mesh=mesh,
        precision="fp16",
        seed=3,
        log_every=1,
        devices=jax.devices()[:count],
    )
    return trainer.fit(
        {"x": x, "y": np.roll(x, 1, axis=1)},
        steps=steps,
        batch_size=8,
        run_dir=folder,
        checkpoint=mw.CheckpointConfig(every=2, keep_last=1),
        progress=False,
    )


def everything(result):
    """Return all arrays of a training state by group and canonical path."""
    groups = CanonicalForm(result.assembled).copy(result.state)
    return {f"{g}/{path}": np.asarray(v) for g, vs in groups.items() for path, v in vs.items()}


def make(out):
    """Make both runs and what is expected of them."""
    import json
    import shutil

    from meshwright.cli.main import main

    def train_gpt(steps, run):
        sys.argv = ["meshwright", "train", *GPT, "mesh.fsdp=2", "mesh.tensor=2",
                    f"training.steps={steps}", f"hydra.run.dir={run}"]  # fmt: skip
        assert main(sys.argv[1:]) == 0

    gpt, noisy = out / "gpt", out / "noisy"
    train_gpt(SAVED, gpt)
    shutil.copytree(gpt, out / "gpt_resumed")
    train_gpt(RESUMED, out / "gpt_resumed")
    lines = (out / "gpt_resumed/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"train"' in line]
    for run, done in ((gpt, SAVED), (out / "gpt_resumed", RESUMED)):
        params = mw.read_params(run, step=done)
        np.savez_compressed(out / f"gpt_{done}.npz", losses=losses[:done], **params)
    sys.argv = ["train.py"]
    saved = fit_noisy(noisy, SAVED, mesh="data=2,fsdp=2", count=4)
    shutil.copytree(noisy, out / "noisy_resumed")
    resumed = fit_noisy(out / "noisy_resumed", RESUMED, mesh="data=2,fsdp=2", count=4)
    for result in (saved, resumed):
        arrays, losses = everything(result), list(result.losses.values())
        np.savez_compressed(out / f"noisy_{result.steps}.npz", losses=losses, **arrays)
    for folder in (out / "gpt_resumed", out / "noisy_resumed"):
        shutil.rmtree(folder)
    for file in [*out.rglob("commit_success.txt"), *out.rglob("train.log"), *out.rglob("run.json")]:
        # Nobody else has these folders.
        file.write_text(re.sub(re.escape(f"{out}/"), "", file.read_text()))


if __name__ == "__main__":
    mw.simulate_devices(4)
    make(Path(sys.argv[1]).absolute())
