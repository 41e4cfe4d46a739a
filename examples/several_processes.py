"""Several processes: one mesh over the devices of all of them, on one machine or several.

Shows which devices and which part of a weight each process has, and the common loss.
Run: python -m meshwright.launch --nprocs=2 --devices-per-process=4 examples/several_processes.py
     python examples/several_processes.py   (one process alone, to compare the losses)
On several machines, export MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK in each process instead.
"""

import os

import meshwright as mw
from meshwright.distributed import setup_multinode

if "WORLD_SIZE" not in os.environ:
    mw.simulate_devices(8)
info = setup_multinode()  # first, before anything uses JAX

import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 256, rngs=rngs)
        self.down = nnx.Linear(256, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


x = np.random.default_rng(0).normal(size=(64, 32)).astype("float32")
trainer = mw.Trainer(
    model=Net,
    loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
    optimizer=optax.adam(1e-2),
    mesh="fsdp=-1",
)
# Every process runs the same code on the same data, and reads only its own samples.
result = trainer.fit({"x": x, "y": x[:, ::-1].copy()}, batch_size=32, steps=10)

rank, count = info["rank"], info["world_size"]
weight = result.params["up.kernel"]
rows = sorted(
    (shard.index[1].start or 0, shard.index[1].stop or 256) for shard in weight.addressable_shards
)
print(
    f"process {rank} of {count}: {info['local_devices']} of {info['global_devices']} devices, "
    f"columns {rows[0][0]} to {rows[-1][1]} of up.kernel",
    flush=True,
)
if info["is_master"]:
    print(f"loss {result.losses[1]:.6f} → {result.losses[10]:.6f}")
