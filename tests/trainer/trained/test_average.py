"""The moving average of the weights and the best checkpoint: resumed, loaded, exported."""

import shutil

import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import meshwright as mw
from meshwright.cli.main import main

RNG = np.random.default_rng(0)
ARRAYS = {
    "x": RNG.normal(size=(16, 8)).astype(np.float32),
    "y": RNG.normal(size=(16, 4)).astype(np.float32),
}
DECAY, RATE, STEPS = 0.3, 0.2, 6
OFTEN = mw.CheckpointConfig(every=1, keep_last=9)


def squares(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def build(rngs):
    return nnx.Linear(8, 4, use_bias=False, rngs=rngs)


def trainer(mesh="fsdp=4,tensor=2", **settings):
    return mw.Trainer(
        model=build,
        loss=squares,
        optimizer=optax.sgd(RATE),
        mesh=mesh,
        sharding=mw.ShardingConfig(min_shard_size=0),
        **settings,
    )


def by_hand(kernel, steps):
    """Return kernel and average after some steps, in float64."""
    kernel = np.asarray(kernel, np.float64)
    x, y, average = ARRAYS["x"].astype(float), ARRAYS["y"].astype(float), kernel
    for n in range(steps):
        kernel = kernel - RATE * 2 / y.size * x.T @ (x @ kernel - y)
        decay = min(DECAY, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * kernel
    return kernel, average


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run that changed its mesh in the middle, its result, and its initial kernel."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"run_dir": folder, "eval_data": ARRAYS, "eval_every": 1, "checkpoint": OFTEN}
    first = trainer(ema_decay=DECAY, eval_ema=True)
    initial = np.asarray(first.assemble(ARRAYS).init(0).params[0])
    first.fit([ARRAYS] * STEPS, steps=3, progress=False, **settings)
    again = trainer("data=8", ema_decay=DECAY, eval_ema=True)
    return folder, again.fit([ARRAYS] * STEPS, steps=STEPS, progress=False, **settings), initial


@pytest.mark.full
def test_the_average_is_that_of_a_plain_loop_across_meshes(run):
    folder, result, initial = run
    kernel, average = by_hand(initial, STEPS)
    np.testing.assert_allclose(result.params["kernel"], kernel, rtol=1e-5, atol=1e-6)
    averaged = result.averaged()
    np.testing.assert_allclose(averaged.model.kernel[...], average, rtol=1e-5, atol=1e-6)
    loaded = mw.load_model(folder, model=build, ema=True)
    np.testing.assert_array_equal(loaded.kernel[...], averaged.model.kernel[...])


def test_evaluations_are_of_the_average_if_asked(run):
    _, result, initial = run
    for step, values in result.eval.items():
        _, average = by_hand(initial, step)
        error = ((ARRAYS["x"] @ average - ARRAYS["y"]) ** 2).mean()
        assert values["loss"] == pytest.approx(error, rel=1e-5)


def test_the_averages_are_sharded_like_the_weights():
    assembled = trainer(ema_decay=DECAY).assemble(ARRAYS)
    (leaf,) = [each for each in assembled.step.optimizer.leaves if each.path == "ema.kernel"]
    assert leaf.placement.dims == assembled.decision.optimizer[0].dims


def test_an_export_holds_the_average(run, tmp_path):
    folder, result, _ = run
    file = tmp_path / "model.safetensors"
    assert main(["export", str(folder), str(file), "--which", "last", "--ema"]) == 0
    np.testing.assert_array_equal(load_file(file)["kernel"], result.averaged().params["kernel"])


def test_the_best_checkpoint_is_loaded_by_name(tmp_path):
    own = trainer("data=8", eval_loss=lambda model, batch: -squares(model, batch))
    result = own.fit(
        [ARRAYS] * STEPS,
        steps=STEPS,
        run_dir=tmp_path,
        eval_data=ARRAYS,
        eval_every=1,
        checkpoint=OFTEN,
        progress=False,
    )
    best = min(result.eval, key=lambda step: result.eval[step]["loss"])
    assert best == 1
    loaded = mw.load_model(tmp_path, model=build, which="best")
    expected = mw.read_params(tmp_path, step=best)["kernel"]
    np.testing.assert_array_equal(loaded.kernel[...], expected)
    np.testing.assert_array_equal(own.best().params["kernel"], expected)
    with pytest.raises(mw.UserError, match="keeps no moving average"):
        mw.load_model(tmp_path, model=build, ema=True)
    shutil.rmtree(tmp_path / "checkpoints" / "1")
    with pytest.warns(UserWarning, match=r"lowest evaluation loss, .* at step 1, was not saved"):
        assert own.best().steps == 2


def test_what_does_not_exist_is_refused(tmp_path):
    trainer("data=8").fit([ARRAYS], steps=1, run_dir=tmp_path, progress=False)
    with pytest.raises(mw.UserError, match="has an evaluation loss"):
        mw.load_model(tmp_path, model=build, which="best")
    with pytest.raises(mw.UserError, match=r"ema_decay was None in the checkpoint .* and is 0.5"):
        trainer("data=8", ema_decay=0.5).fit([ARRAYS] * 2, steps=2, run_dir=tmp_path)
    with pytest.raises(mw.UserError, match="not between 0 and 1"):
        trainer(ema_decay=1.5)
    with pytest.raises(mw.UserError, match="keeps no moving average"):
        trainer(eval_ema=True).fit([ARRAYS], steps=1, eval_data=ARRAYS)
