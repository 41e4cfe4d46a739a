"""Resuming: the run that goes on is the run that would have been."""

import json
import signal

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module
from small_models import Norms, Residuals, square_loss, vectors

import meshwright as mw
from meshwright.checkpoint import read_params
from meshwright.config.schema import CheckpointConfig, ShardingConfig
from meshwright.errors import UserError
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.trainer.starting import resume
from meshwright.trainer.starting.resume import config_changes

__all__ = ["quick_module"]

pytestmark = pytest.mark.usefixtures("quick_module")

SAMPLES, BATCH = 96, 16
ARRAYS = {name: np.asarray(array) for name, array in vectors(SAMPLES).items()}


class Seen(mw.Callback):
    """Notes the loss of every step."""

    def __init__(self):
        self.losses = {}

    def on_log(self, step, values):
        self.losses[step] = values["loss"]


class Noisy(nnx.Module):
    """Dropout, batch statistics and a plain layer: everything a checkpoint must hold."""

    def __init__(self, rngs):
        self.blocks = Residuals(2, rngs=rngs)
        self.norms = Norms(rngs=rngs)

    def __call__(self, x):
        return self.blocks(x) + self.norms(x)


def make_trainer(mesh="fsdp=4,tensor=2", model=Noisy, count=8, **settings):
    return mw.Trainer(
        model=lambda rngs: model(rngs),
        loss=square_loss,
        optimizer=optax.adamw(0.01),
        mesh=mesh,
        seed=3,
        log_every=1,
        devices=jax.devices()[:count],
        **settings,
    )


def train(folder, steps, trainer=None, restart=False, **settings):
    trainer, seen = trainer or make_trainer(**settings), Seen()
    result = trainer.fit(
        ARRAYS,
        steps=steps,
        batch_size=BATCH,
        run_dir=folder,
        callbacks=[seen],
        checkpoint=CheckpointConfig(every=5),
        restart=restart,
    )
    return result, seen.losses


@pytest.fixture(scope="module")
def trainer(quick_module):
    """What trains both, compiled once."""
    return make_trainer()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, trainer):
    """Twenty steps in one go."""
    return train(tmp_path_factory.mktemp("whole"), 20, trainer, restart=True)


@pytest.fixture(scope="module")
def half(tmp_path_factory, trainer):
    """The folder of the first ten steps."""
    folder = tmp_path_factory.mktemp("half")
    train(folder, 10, trainer, restart=True)
    return folder


def leaves(result):
    return {
        path: np.asarray(
            jax.random.key_data(v) if jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        )
        for path, v in result.assembled.canonical(result.state).items()
    }


def copy_run(folder, to):
    import shutil

    return shutil.copytree(folder, to / "run")


def test_ten_and_ten_steps_are_twenty_bit_for_bit(whole, half, tmp_path):
    result, losses = whole
    resumed, later = train(copy_run(half, tmp_path), 20)
    assert list(later) == list(range(11, 21))
    assert later == {step: losses[step] for step in range(11, 21)}
    for path, value in leaves(result).items():
        np.testing.assert_array_equal(leaves(resumed)[path], value, err_msg=path)
    assert resumed.steps == 20
    assert int(resumed.state.step) == 20


@pytest.mark.full
def test_eight_devices_then_four_then_one_see_the_same_samples(whole, half, tmp_path):
    _, losses = whole
    folder = copy_run(half, tmp_path)
    _, on_four = train(folder, 15, mesh="data=2,fsdp=2", count=4)
    _, on_one = train(folder, 20, mesh="", count=1)
    later = on_four | on_one
    assert list(later) == list(range(11, 21))
    np.testing.assert_allclose(list(later.values()), [losses[u] for u in later], rtol=2e-5)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "resume"] == [10, 15]


@pytest.mark.full
def test_rolled_blocks_go_on_unrolled(tmp_path):
    folder = tmp_path / "run"
    scan = ShardingConfig(blocks="scan", min_shard_size=0)
    first, _ = train(folder, 2, model=Rolled, sharding=scan)
    assert any(step.stacked for step in first.assembled.traced.layout.step_leaves)
    second, _ = train(folder, 3, model=Rolled)
    assert second.steps == 3
    again, _ = train(tmp_path / "whole", 3, model=Rolled)
    for path, value in leaves(again).items():
        np.testing.assert_allclose(leaves(second)[path], value, rtol=1e-4, atol=1e-6, err_msg=path)


class Rolled(Residuals):
    def __init__(self, rngs):
        super().__init__(2, rngs=rngs)


def test_a_checkpoint_of_another_model_is_refused_by_name(half, tmp_path):
    folder = copy_run(half, tmp_path)
    with pytest.raises(UserError, match="does not fit the model") as caught:
        train(folder, 20, model=Rolled)
    assert "`blocks.0.down.kernel` is missing in the checkpoint and [32, 16] in the run" in (
        caught.value.why
    )
    assert (folder / "checkpoints" / "10").is_dir()


@pytest.mark.full
def test_another_number_of_microbatches_is_warned_of(half, tmp_path):
    folder = copy_run(half, tmp_path)
    train(folder, 10, gradient_accumulation_steps=2)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [line["message"] for line in lines if line["kind"] == "warning"]
    expected = "a step had 1 microbatch before the checkpoint and has 2 now"
    assert any(expected in message for message in told)


def test_never_must_and_a_path(half, trainer, tmp_path):
    given = {"batch_size": BATCH, "run_dir": tmp_path / "new"}
    with pytest.raises(UserError, match='resume="must", and there is no checkpoint'):
        trainer.fit(ARRAYS, steps=11, resume="must", **given)
    with pytest.raises(UserError, match="there is no checkpoint in"):
        trainer.fit(ARRAYS, steps=11, resume=str(tmp_path), **given)
    with pytest.raises(UserError, match="there is no folder"):
        trainer.fit(ARRAYS, steps=11, resume=str(tmp_path / "nowhere"), **given)
    result = trainer.fit(ARRAYS, steps=11, resume=str(half), **given)
    assert list(result.losses) == [11]
    assert set(read_params(tmp_path / "new")) == {
        path for path in leaves(result) if path in read_params(half)
    }


def test_only_what_decides_the_course_of_a_run_is_compared():
    before = {"model": {"kind": "gpt", "hidden": 8}, "mesh": {"fsdp": 8}, "run": {"seed": 1}}
    now = {"model": {"kind": "gpt", "hidden": 16}, "mesh": {"fsdp": 2}, "run": {"seed": 1}}
    assert config_changes(before, now) == ["model.hidden was 8 and is 16"]
    assert config_changes({}, now) == []


def test_other_data_or_another_batch_is_refused_and_nothing_is_touched(half, tmp_path):
    folder = copy_run(half, tmp_path)
    before = {f: f.read_bytes() for f in folder.glob("*.json*")}
    trainer = mw.Trainer(
        model=lambda rngs: Noisy(rngs), loss=square_loss, optimizer=optax.adamw(0.01), mesh="fsdp=8"
    )
    with pytest.raises(UserError, match="differs from that of the checkpoint") as caught:
        trainer.fit(
            {name: 2 * array for name, array in ARRAYS.items()},
            steps=20,
            batch_size=2 * BATCH,
            run_dir=folder,
        )
    assert "the global batch was 16 samples and is 32" in caught.value.why
    assert "the data's fingerprint was" in caught.value.why
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        trainer.fit(ARRAYS, steps=20, batch_size=BATCH, run_dir=folder, resume="never")
    with pytest.raises(UserError, match="does not fit the model"):
        train(folder, 20, model=Rolled)
    assert {f: f.read_bytes() for f in folder.glob("*.json*")} == before


def test_a_signal_saves_and_the_run_goes_on(tmp_path):
    class Signal(mw.Callback):
        """Asks to stop while training, as a user or a cluster does."""

        def on_log(self, step, values):
            if step == 3:
                signal.raise_signal(signal.SIGTERM)

    trainer = mw.Trainer(
        model=lambda rngs: Rolled(rngs), loss=square_loss, optimizer=optax.adamw(0.01), log_every=1
    )
    given = {"batch_size": BATCH, "run_dir": tmp_path}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(ARRAYS, steps=9, callbacks=[Signal()], eval_data=ARRAYS, **given)
    assert caught.value.code == 75
    result = trainer.result
    assert signal.getsignal(signal.SIGTERM) is before
    assert (result.interrupted, result.stopped) == (True, "SIGTERM asked to stop")
    assert result.steps < 9
    assert (tmp_path / f"checkpoints/{result.steps}").is_dir()
    assert trainer.fit(ARRAYS, steps=9, **given).steps == 9


def test_a_failure_is_written_down(tmp_path):
    class Failing(mw.Callback):
        def on_log(self, step, values):
            raise RuntimeError("the callback's own fault\nand more")

    trainer = mw.Trainer(
        model=lambda rngs: Rolled(rngs), loss=square_loss, optimizer=optax.adamw(0.01)
    )
    with pytest.raises(RuntimeError):
        trainer.fit(ARRAYS, steps=2, batch_size=BATCH, run_dir=tmp_path, callbacks=[Failing()])
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["message"]) == ("stop", "failed: the callback's own fault")


@pytest.mark.full
def test_early_stopping_remembers_what_it_saw_before_the_checkpoint(tmp_path):
    class Unlucky(mw.Callback):
        """Is asked to stop after some steps."""

        def on_log(self, step, values):
            if step == 5:
                signal.raise_signal(signal.SIGTERM)

    def go_on(callbacks=(), folder="run"):
        trainer = mw.Trainer(
            model=lambda rngs: Residuals(1, rngs=rngs),
            loss=square_loss,
            optimizer=optax.sgd(0.0),
            mesh="data=1",
            log_every=1,
            devices=jax.devices()[:1],
        )
        return trainer.fit(
            ARRAYS,
            batch_size=BATCH,
            steps=12,
            eval_data=ARRAYS,
            eval_every=2,
            eval_batches=1,
            callbacks=[mw.EarlyStopping(3), *callbacks],
            run_dir=tmp_path / folder,
            progress=False,
        )

    # Nothing becomes better at a learning rate of 0: the best is the first of four evaluations.
    assert go_on(folder="whole").steps == 8
    with pytest.raises(SystemExit):
        go_on([Unlucky()])
    assert go_on().steps == 8
    assert go_on().steps == 8


def test_devices_are_made_by_all_processes_before_one_of_them_looks(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(resume.jax, "devices", lambda: asked.append("devices"))
    monkeypatch.setattr(resume, "_find_newest", lambda *_, **__: asked.append("checkpoints") or {})
    monkeypatch.setattr(resume, "broadcast", lambda value: asked.append("others") or value)
    assert resume.find_resume_point("auto", tmp_path) is None
    assert asked == ["devices", "checkpoints", "others"]


def test_a_restarted_run_goes_on_whatever_it_was_asked_to_resume(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(resume, "_find_newest", lambda *args, **_: looked.append(args[0]) or {})
    for folder in ("mine", "other"):
        (tmp_path / folder / "checkpoints" / "5").mkdir(parents=True)
    earlier = EarlierAttempts(count=1, started=0.0, run_dir=str(tmp_path / "mine"))
    for name, value in earlier.to_environment().items():
        monkeypatch.setenv(name, value)
    for asked in ("never", str(tmp_path / "other")):
        resume.find_resume_point(asked, tmp_path / "mine")
    assert looked == [tmp_path / "mine"] * 2
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        resume.find_resume_point("never", tmp_path / "other")


def anchored(rate, pull=0.5):
    """Descend, but stay near the initial parameters, which the state holds, and an empty array."""

    def update(gradients, state, params):
        move = lambda g, p, p0: -rate * (g + pull * (p - p0))  # noqa: E731
        return jax.tree.map(move, gradients, params, state[0]), state

    return optax.GradientTransformation(lambda params: (params, np.zeros((0, 16))), update)


@pytest.mark.full
def test_an_optimizer_that_remembers_the_initial_parameters(tmp_path):
    linear = lambda rngs: nnx.Linear(16, 16, rngs=rngs)  # noqa: E731
    batches = [{name: x[n : n + BATCH] for name, x in ARRAYS.items()} for n in (0, 16, 32, 48)]
    for steps in (2, 4):
        trainer = mw.Trainer(
            model=linear, loss=square_loss, optimizer=anchored(0.3), mesh="fsdp=4,tensor=2", seed=3
        )
        trained = trainer.fit(batches, steps=steps, run_dir=tmp_path / "run").model
    graph, start = nnx.split(linear(nnx.Rngs(3)))
    params = start
    for batch in batches:
        gradient = jax.grad(lambda p, batch=batch: square_loss(nnx.merge(graph, p), batch))(params)
        params = jax.tree.map(
            lambda p, g, p0: p - 0.3 * (g + 0.5 * (p - p0)), params, gradient, start
        )
    np.testing.assert_allclose(trained.kernel[...], params["kernel"][...], rtol=1e-5, atol=1e-6)


def test_a_run_that_learns_from_rewards_keeps_them():
    before = {"grpo": {"rewards": ["a"], "reward_seconds": 1}, "generation": {"temperature": 0.9}}
    now = {"grpo": {"rewards": ["b"], "reward_seconds": 2}, "generation": {"temperature": 0.5}}
    assert config_changes(before, now) == [
        "grpo.rewards was ['a'] and is ['b']",
        "generation.temperature was 0.9 and is 0.5",
    ]
