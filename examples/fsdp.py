"""FSDP: every device holds one part of the weights, the gradients and the optimizer state.

Shows what each device holds, what a step sends, and that the losses are those of one device.
Run: python examples/fsdp.py          (on 8 virtual devices)
     python examples/fsdp.py --real   (on the devices of this machine)
"""

import sys

import meshwright as mw

if "--real" not in sys.argv:
    mw.simulate_devices(8)

import jax
import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    """Three layers whose sizes divide by the number of devices."""

    def __init__(self, rngs):
        self.first = nnx.Linear(64, 512, rngs=rngs)
        self.second = nnx.Linear(512, 512, rngs=rngs)
        self.last = nnx.Linear(512, 64, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def trainer(**where):
    return mw.Trainer(model=Net, loss=loss, optimizer=optax.adam(1e-3), log_every=1, **where)


def held(tree):
    """Return the bytes of a tree on the first device, and on all of them together."""
    arrays = [array for array in jax.tree.leaves(tree) if hasattr(array, "addressable_shards")]
    return sum(a.addressable_shards[0].data.nbytes for a in arrays), sum(a.nbytes for a in arrays)


x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
batch = {"x": x, "y": x[:, ::-1]}

sharded = trainer(mesh="fsdp=-1")
result = sharded.fit([batch] * 5, steps=5)
alone = trainer(devices=jax.devices()[:1]).fit([batch] * 5, steps=5)

for name, tree in (("parameters", result.state.params), ("optimizer", result.state.optimizer)):
    own, whole = held(tree)
    print(f"{name}: {own:,} of {whole:,} bytes on each device, 1/{whole / own:.1f}")
difference = max(abs(result.losses[n] - alone.losses[n]) for n in alone.losses)
print(f"largest difference from the losses of one device: {difference:.1e}")
print(mw.ledger(sharded, batch))
