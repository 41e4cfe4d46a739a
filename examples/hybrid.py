"""Hybrid parallelism: the same model on any combination of axes; only the mesh changes.

Shows for each mesh what a device holds and sends, and how far the losses are from one device; then
proves one of them equal in float64.
Run: python examples/hybrid.py          (on 8 virtual devices)
     python examples/hybrid.py --real   (on 8 or more devices of this machine)
"""

import sys

import meshwright as mw

if "--real" not in sys.argv:
    mw.simulate_devices(8)

import jax
import numpy as np
import optax
from flax import nnx


class Block(nnx.Module):
    """x + down(relu(up(x)))."""

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    """Two blocks."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])

    def __call__(self, x):
        return self.blocks[1](self.blocks[0](x))


def trainer(mesh, devices):
    loss = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()
    return mw.Trainer(model=Net, loss=loss, optimizer=optax.adam(1e-3), mesh=mesh, devices=devices)


x = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
batch, devices = {"x": x, "y": x[:, ::-1]}, jax.devices()[:8]
alone = trainer("data=1", devices[:1]).fit([batch] * 3, steps=3)
print(f"{'mesh':24} {'bytes held':>10} {'bytes sent':>10}  difference from one device")
for mesh in ("data=8", "fsdp=4,data=2", "fsdp=4,tensor=2", "pipe=2,fsdp=2,tensor=2"):
    here = trainer(mesh, devices)
    result = here.fit([batch] * 3, steps=3)
    held = sum(array.addressable_shards[0].data.nbytes for array in result.state.params)
    sent, gap = mw.ledger(here, batch).sent_bytes, abs(result.losses[3] - alone.losses[3])
    print(f"{mesh:24} {held:10,} {sent:10,}  {gap:.1e}")
proof = trainer("fsdp=4,tensor=2", devices).verify([batch] * 2, steps=2)
print(f"fsdp=4,tensor=2 is {'proven equal' if proof.passed else 'NOT equal'} to one device")
