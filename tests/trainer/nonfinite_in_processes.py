"""What each of two processes runs: trainings that meet a NaN, under all three policies."""

import json
import sys

import numpy as np
import optax
from flax import nnx

import meshwright as mw

RNG = np.random.default_rng(0)
BATCHES = [{"x": RNG.normal(size=(4, 8)).astype("float32")} for _ in range(8)]


def spoiled(number):
    """Return the batches with a NaN in the last row, which only process 1 holds."""
    x = BATCHES[number]["x"].copy()
    x[3, 0] = np.nan
    return [{"x": x} if n == number else b for n, b in enumerate(BATCHES)]


def without(*numbers):
    return [b for n, b in enumerate(BATCHES) if n not in numbers]


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


def fit(trainer, data, folder, steps=5):
    return trainer.fit(
        data,
        steps=steps,
        restart=True,
        run_dir=folder,
        checkpoint=mw.CheckpointConfig(every=3),
    )


def pieces(result):
    return [np.asarray(x.addressable_data(0)) for x in result.state.params]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(pieces(one), pieces(other), strict=True))


def main(address, number, folder):
    import jax

    from meshwright.processes import connect

    jax.config.update("jax_num_cpu_devices", 1)
    connect(address, 2, int(number))
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        loss=loss,
        optimizer=optax.adam(0.01),
        mesh="fsdp=2",
        sharding=mw.ShardingConfig(min_shard_size=0),
        log_every=1,
    )
    said = {}
    try:
        fit(trainer, spoiled(3), f"{folder}/stop")
    except mw.UserError as error:
        said["stop"] = [error.what, error.why, int(error.exit_code)]
    # The same compiled step serves the other policies.
    trainer.on_nonfinite = "skip"
    skipped = fit(trainer, spoiled(3), f"{folder}/skip", steps=6)
    trainer.on_nonfinite = "rewind"
    back = fit(trainer, spoiled(3), f"{folder}/rewind")
    clean = fit(trainer, without(3), f"{folder}/clean")
    said["losses"] = [list(result.losses.values()) for result in (skipped, back, clean)]
    said["same"] = [same(skipped, clean), same(back, clean)]
    jax.distributed.shutdown()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
