"""Tensor parallelism (SPMD): one program, in which devices hold parts of every layer.

Shows how each layer is sharded, by default or by a PartitionSpec, and that losses stay the same.
Run: python examples/tensor_parallel.py          (on 8 virtual devices)
     python examples/tensor_parallel.py --real   (on an even number of devices of this machine)
"""

import sys

import meshwright as mw

if "--real" not in sys.argv:
    mw.simulate_devices(8)

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P


class Block(nnx.Module):
    """Up, relu, down: the first layer is sharded by columns, the second by rows."""

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def losses(**where):
    trainer = mw.Trainer(model=Block, loss=loss, optimizer=optax.adam(1e-2), log_every=1, **where)
    return trainer.fit([batch] * 5, steps=5)


x = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
batch = {"x": x, "y": x[:, ::-1]}

derived = losses(mesh="data=2,tensor=-1")
mw.inspect_sharding(derived.model, "sharded as the traced program suggests")

# The same, written down: any PartitionSpec for any path.
rules = {"up.kernel": P(None, "tensor"), "up.bias": P("tensor"), "down.kernel": P("tensor", None)}
written = losses(mesh="data=2,tensor=-1", sharding=mw.ShardingConfig(rules=rules))
same = all(
    written.params[path].sharding == array.sharding for path, array in derived.params.items()
)
print(f"the rules {'agree with' if same else 'differ from'} what was derived")

alone = losses(devices=jax.devices()[:1])
for name, result in (("derived", derived), ("written", written)):
    difference = max(abs(result.losses[n] - alone.losses[n]) for n in alone.losses)
    print(f"{name}: largest difference from the losses of one device {difference:.1e}")
