"""Data parallelism: every device holds the whole model and computes on its own samples.

Shows what each device gets, what a step sends, and that the losses are those of one device.
Run: python examples/data_parallel.py          (on 8 virtual devices)
     python examples/data_parallel.py --real   (on the devices of this machine)
"""

import sys

import meshwright as mw

if "--real" not in sys.argv:
    mw.simulate_devices(8)

import jax
import numpy as np
import optax
from flax import nnx


class Classifier(nnx.Module):
    """Two layers; nothing in here knows about devices."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def trainer(**where):
    return mw.Trainer(model=Classifier, loss=loss, optimizer=optax.adam(1e-2), log_every=1, **where)


x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
batch = {"x": x, "y": x[:, :10].argmax(axis=1)}

everywhere = trainer(mesh="data=-1")
result = everywhere.fit([batch] * 10, steps=10)
alone = trainer(devices=jax.devices()[:1]).fit([batch] * 10, steps=10)

count = jax.device_count()
parameters = sum(array.size for array in result.params.values())
print(f"{count} devices, each with {64 // count} of 64 samples and all {parameters:,} parameters")
print(result)
difference = max(abs(result.losses[n] - alone.losses[n]) for n in alone.losses)
print(f"largest difference from the losses of one device: {difference:.1e}")
ledger = mw.ledger(everywhere, batch)
print(f"a step sends {ledger.sent_bytes:,} bytes from each device: {2 * (count - 1)}/{count} of")
print(f"the {4 * parameters:,} bytes of gradients; the minimum is {ledger.minimum_bytes:,}")
