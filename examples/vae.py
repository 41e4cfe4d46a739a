"""A variational autoencoder, 784-512-20, on a mesh of data and tensor axes.

Shows how encoder and decoder are sharded, the two parts of its loss, and that noise is the same on
every mesh, so that the losses are those of one device.
Run: python examples/vae.py          (on 8 virtual devices)
     python examples/vae.py --real   (on an even number of devices of this machine)
"""

import sys

import meshwright as mw

if "--real" not in sys.argv:
    mw.simulate_devices(8)

import jax
import numpy as np
import optax

from meshwright.models.vae import VAE
from meshwright.tasks.reconstruction import Reconstruction

task = Reconstruction(input_shape=(784,))
data = [task.synthetic_batch(seed, 64) for seed in range(20)]


def train(**where):
    parts = {}
    trainer = mw.Trainer(
        model=lambda rngs: VAE(input_size=784, hidden_size=512, latent_size=20, rngs=rngs),
        loss=task.loss,
        optimizer=optax.adam(1e-3),
        **where,
    )
    return trainer.fit(data, steps=20, on_metrics=lambda n, m: parts.update({n: m})), parts


result, parts = train(mesh="data=2,tensor=-1")
mw.inspect_sharding(result.model.encoder, "encoder")
for step in (1, 20):
    nats, kl = parts[step]["reconstruction"], parts[step]["kl"]
    print(f"step {step}: {result.losses[step]:.2f} = {nats:.2f} nats of pixels + {kl:.2f} KL")
x = data[0]["x"]
output = result.model(x)
error = np.abs(jax.nn.sigmoid(output.logits) - x).mean()
print(f"codes {output.mean.shape}, mean error of a reconstructed pixel {error:.3f}")
alone, _ = train(devices=jax.devices()[:1])
difference = max(abs(result.losses[n] / alone.losses[n] - 1) for n in alone.losses)
print(f"largest relative difference from the losses of one device: {difference:.1e}")
