"""What each process of a test runs: rows divided over processes, and which samples it reads."""

import json
import sys

import numpy as np
import optax

import meshwright as mw
from meshwright.models.llama3 import Llama3
from meshwright.tasks.language_modeling import LanguageModeling

MESHES = ["context=4", "data=2,context=2"]


class Samples:
    """Rows, and the numbers of those that were read."""

    def __init__(self):
        self.read = set()

    def __len__(self):
        return 512

    def __getitem__(self, number):
        self.read.add(int(number))
        return {"tokens": np.random.default_rng(number).integers(64, size=17, dtype=np.int32)}


def build(rngs):
    sizes = {"vocab_size": 64, "hidden_size": 16, "mlp_size": 16, "num_blocks": 1}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "context_length": 16}
    return Llama3(**sizes, **heads, rngs=rngs)


def train(mesh, folder, **settings):
    loss, samples = LanguageModeling().loss, Samples()
    own = mw.Trainer(model=build, loss=loss, optimizer=optax.sgd(0.5), mesh=mesh, **settings)
    fitted = own.fit(samples, steps=4, batch_size=8, run_dir=f"{folder}/{mesh}", progress=False)
    return list(fitted.losses.values()), sorted(samples.read)


def main(address, number, folder):
    import jax

    from meshwright.processes import connect

    jax.config.update("jax_num_cpu_devices", 2)
    connect(address, 2, int(number))
    said = {mesh: train(mesh, folder) for mesh in MESHES}
    jax.distributed.shutdown()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
