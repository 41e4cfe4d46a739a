"""Our side of ddp_scaling.py: a process that trains with `mw.Trainer`, in turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ddp_turns import CASES, CHANNELS, IMAGE, WIDTHS, Turns

TURNS = Turns()

from meshwright.distributed import setup_multinode

setup_multinode()

import jax
import numpy as np
import optax
from flax import nnx

import meshwright as mw


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        pairs = pairwise(WIDTHS)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])

    def __call__(self, x):
        """Return the logits [B, 10] of x [B, 784]."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        pairs = pairwise(CHANNELS)
        self.convs = nnx.List(
            [nnx.Conv(a, b, (3, 3), strides=2, padding=1, rngs=rngs) for a, b in pairs]
        )
        self.head = nnx.Linear(CHANNELS[-1], 10, rngs=rngs)

    def __call__(self, x):
        """Return the logits [B, 10] of x [B, H, W, C]."""
        for conv in self.convs:
            x = nnx.relu(conv(x))
        return self.head(x.mean((1, 2)))


class InTurns(mw.Callback):
    """Waits for its turn after every logged step, and tells how long the last one took."""

    start = 0.0
    over = False

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell what was measured, and wait for the next turn."""
        if self.over:
            return
        # Nothing of it is left to run in the turns of others.
        jax.block_until_ready(jax.live_arrays())
        now = time.perf_counter()
        # The first step is logged by itself, and so that the process is ready.
        TURNS.tell(seconds=now - self.start)
        if not TURNS.told_to_go():
            self.over = True
            self.context.stop("the comparison is over")
        self.start = time.perf_counter()


def loss(model: Any, batch: dict[str, Any]) -> Any:
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def main(name: str) -> None:
    case = CASES[name]
    size = case.batch * TURNS.count
    random = np.random.default_rng(0)
    shape = (WIDTHS[0],) if name == "mlp" else (IMAGE, IMAGE, CHANNELS[0])
    batch = {
        "x": random.normal(size=(size, *shape)).astype("float32"),
        "y": random.integers(0, 10, size).astype("int32"),
    }
    trainer = mw.Trainer(
        model=MLP if name == "mlp" else CNN,
        loss=loss,
        optimizer=optax.sgd(0.01, momentum=0.9),
        mesh=f"data={jax.device_count()}",
        log_every=case.steps,
    )
    trainer.fit(
        lambda step, count: batch, steps=10**6, batch_size=size, callbacks=[InTurns()],
        progress=False,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception as error:
        TURNS.tell(failed=repr(error))
        raise
