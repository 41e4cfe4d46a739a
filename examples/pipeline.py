"""Pipeline parallelism: each stage holds some of the layers, and microbatches flow through them.

Shows stages of equal blocks, stages of layers that all differ, and that neither changes the losses.
Run: python examples/pipeline.py          (on 8 virtual devices)
     python examples/pipeline.py --real   (on 8 or more devices of this machine)
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
    """Four equal blocks: Meshwright finds them, and puts one on each stage."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + nnx.tanh(block(x))
        return x


squares = lambda output, target: ((output - target) ** 2).mean()


def train(**where):
    loss = lambda model, batch: squares(model(batch["x"]), batch["y"])
    trainer = mw.Trainer(model=Net, loss=loss, optimizer=optax.adam(1e-2), log_every=1, **where)
    return trainer.fit([{"x": x, "y": x[:, ::-1]}] * 3, steps=3)


x = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
devices = jax.devices()[:8]
staged = train(mesh="pipe=4,data=2", pipeline={"num_microbatches": 16}, devices=devices)
print(staged.assembled.pipeline_report.summary())
for count in (2, 8, 27):
    busy = float(mw.pipeline.get_schedule("1f1b").efficiency(count, 4))
    print(f"4 stages, {count} microbatches: efficiency {busy:.0%}")
alone = train(devices=devices[:1])
difference = max(abs(staged.losses[n] - alone.losses[n]) for n in alone.losses)
print(f"largest difference from the losses of one device: {difference:.1e}")

sizes = ((784, 512), (512, 512), (512, 256), (256, 10))
layers = [nnx.Linear(*size, rngs=nnx.Rngs(0)) for size in sizes]
images, target = np.ones((16, 784)), np.zeros((16, 10))
pipeline = mw.pipeline.Pipeline(layers, loss=squares, example=images, num_stages=4)
print(pipeline)
loss, _ = pipeline.loss_and_gradients(images, target)
difference = abs(loss - squares(nnx.Sequential(*layers)(images), target))
print(f"difference from the same layers on one device: {difference:.1e}")
