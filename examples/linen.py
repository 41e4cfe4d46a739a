"""Flax Linen: a Linen model is trained as it is, sharded and in stages.

Shows the paths of its parameters, what each device holds, and that the losses are those of one
device.
Run: python examples/linen.py          (on 8 virtual devices)
     python examples/linen.py --real   (on 8 or more devices of this machine)
"""

import sys

import meshwright as mw

if "--real" not in sys.argv:
    mw.simulate_devices(8)

import flax.linen as nn
import jax
import numpy as np
import optax


class Block(nn.Module):
    """x + a layer of x."""

    @nn.compact
    def __call__(self, x):
        return x + nn.tanh(nn.Dense(64)(x))


class Net(nn.Module):
    """Four equal blocks and a head, in Linen's own style."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = Block()(x)
        return nn.Dense(10)(x)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def train(**where):
    trainer = mw.Trainer(model=Net(), loss=loss, optimizer=optax.adam(1e-2), log_every=1, **where)
    return trainer.fit([batch] * 3, steps=3)


x = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
batch, devices = {"x": x, "y": x[:, :10].argmax(axis=1)}, jax.devices()[:8]
sharded = train(mesh="fsdp=4,tensor=2", devices=devices)
mw.inspect_sharding(sharded.model, "a Linen model on fsdp=4,tensor=2")
staged = train(mesh="pipe=4,data=2", pipeline={"num_microbatches": 16}, devices=devices)
print(staged.assembled.pipeline_report.summary())
alone = train(devices=devices[:1])
for name, result in (("sharded", sharded), ("in stages", staged)):
    difference = max(abs(result.losses[n] - alone.losses[n]) for n in alone.losses)
    print(f"{name}: largest difference from the losses of one device {difference:.1e}")
