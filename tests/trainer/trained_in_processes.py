"""What each process of a test runs: a training in one go, and one in two parts."""

import json
import sys

import numpy as np
import optax
from flax import nnx

import meshwright as mw

DATA = {"x": np.random.default_rng(0).normal(size=(40, 8)).astype("float32")}
HELD_OUT = {"x": DATA["x"][:37]}


class Net(nnx.Module):
    """Dropout between two layers."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


def loss(model, batch):
    return ((model(batch["x"]) - batch["x"][:, ::-1]) ** 2).mean()


def trainer(mesh, **settings):
    return mw.Trainer(
        model=Net,
        loss=loss,
        optimizer=optax.adamw(0.01),
        mesh=mesh,
        log_every=1,
        sharding=mw.ShardingConfig(min_shard_size=0),
        **settings,
    )


def train(own, folder, steps, **settings):
    return own.fit(DATA, steps=steps, batch_size=8, run_dir=folder, eval_data=HELD_OUT, **settings)


def pieces(result):
    return [x.addressable_data(0) for x in result.state.params + result.state.optimizer]


def what_is_said_of_an_iterable():
    try:
        trainer("data=4").fit(iter([DATA]), steps=1)
    except ValueError as error:
        return str(error)
    return ""


def main(address, number, folder):
    import jax

    from meshwright.processes import connect

    jax.config.update("jax_num_cpu_devices", 2)
    connect(address, 2, int(number))
    own = trainer("fsdp=2,tensor=2")
    first = train(own, f"{folder}/parts", 2)
    # What is compiled serves both; the second part is that of a trainer that knows nothing.
    whole = train(own, f"{folder}/whole", 4, restart=True)
    second = train(trainer("fsdp=2,tensor=2"), f"{folder}/parts", 4)
    said = {
        "whole": list(whole.losses.values()),
        "parts": list((first.losses | second.losses).values()),
        "same": [np.array_equal(a, b) for a, b in zip(pieces(whole), pieces(second), strict=True)],
        "eval": [whole.eval_loss, second.eval_loss],
        "samples": whole.eval[4]["eval_samples"],
        "predicted": whole.predict(HELD_OUT).tolist(),
        "iterable": what_is_said_of_an_iterable(),
    }
    jax.distributed.shutdown()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
