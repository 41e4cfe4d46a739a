"""A small model, its loss and data, as a user would write them; tests append to it."""

import os
from pathlib import Path

import numpy as np
from flax import nnx

RANK = int(os.environ.get("RANK", "0"))


def once(name):
    """Whether this is the first call with the name, by any process of any attempt."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Net(nnx.Module):
    """Dropout, so that random streams have to be restored too."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(12, 24, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(24, 12, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


def loss(model, batch):
    off = ((model(batch["x"]) - batch["x"][:, ::-1]) ** 2).mean()
    # Which samples a step has seen.
    return off, {"samples": batch["id"].mean(), "squares": (batch["id"] ** 2).mean()}


def data(step, batch_size):
    x = np.random.default_rng(step).normal(size=(batch_size, 12)).astype("float32")
    ids = np.arange(step * batch_size, (step + 1) * batch_size, dtype="float32")
    return {"x": x, "id": ids}
