"""Mixed precision: the model computes in 16 bits, while weights, updates and loss stay float32.

Shows the types, how far the losses are from float32, and the loss scale that fp16 needs.
Run: python examples/mixed_precision.py          (on 8 virtual devices)
     python examples/mixed_precision.py --real   (on the devices of this machine)
"""

import sys

import meshwright as mw

if "--real" not in sys.argv:
    mw.simulate_devices(8)

import numpy as np
import optax
from flax import nnx

computed = {}


class Net(nnx.Module):
    """Two layers; a note of the type that the hidden values have when the model is traced."""

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.relu(self.up(x))
        computed["hidden"] = hidden.dtype
        return self.down(hidden)


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
batch, last = {"x": x, "y": x[:, ::-1]}, {}
for precision in ("no", "bf16", "fp16"):
    metrics = {}
    result = mw.Trainer(
        model=Net, loss=loss, optimizer=optax.adam(1e-3), mesh="fsdp=-1", precision=precision
    ).fit([batch] * 5, steps=5, on_metrics=lambda step, found: metrics.update(found))
    last[precision] = result.losses[5]
    weight = result.params["up.kernel"].dtype
    print(f"{precision}: computes in {computed['hidden']}, weights in {weight}", end="")
    print(f", loss {last[precision]:.6f}, {abs(last[precision] / last['no'] - 1):.1e} from float32")
scale, skipped = metrics["loss_scale"], metrics["skipped"]
print(f"fp16 multiplied the loss by {scale:,.0f} and skipped {skipped:.0f} steps")
