"""Gradient accumulation: one step from several microbatches, with the activations of one.

Shows that 4 microbatches of 2048 make the same step as a batch of 8192 in less memory, and what
reducing the gradients less often saves.
Run: python examples/accumulation.py          (on 8 virtual devices)
     python examples/accumulation.py --real   (on the devices of this machine)
"""

import sys

import meshwright as mw

if "--real" not in sys.argv:
    mw.simulate_devices(8)

import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    """Two wide layers, so that activations need memory."""

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 1024, rngs=rngs)
        self.down = nnx.Linear(1024, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


x = np.random.default_rng(0).normal(size=(8192, 64)).astype("float32")
batch = {"x": x, "y": x[:, ::-1]}
results = {}
print("microbatches  reductions  temporary bytes  bytes sent  last loss")
for count, every in ((1, 1), (4, 1), (4, 2), (4, 4)):
    trainer = mw.Trainer(
        model=Net,
        loss=loss,
        optimizer=optax.adam(1e-3),
        mesh="data=-1",
        gradient_accumulation_steps=count,
        sync_gradients_every=every,
        clip_norm=1.0,
    )
    result = results[count, every] = trainer.fit([batch] * 5, steps=5)
    ledger = mw.ledger(trainer, batch)
    print(
        f"{count:12}  {count // every:10}  {ledger.temp_bytes:15,}  {ledger.sent_bytes:10,}  "
        f"{result.losses[5]:.6f}"
    )
whole = results[1, 1].losses[5]
difference = max(abs(result.losses[5] - whole) for result in results.values())
print(f"largest difference from the whole batch at once: {difference:.1e}")
