"""How long a run goes on, what it looks at, and what it tells."""

import dataclasses
import json
import math
import time
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module
from small_models import Norms, Residuals, square_loss, vectors

import meshwright as mw
from meshwright.checkpoint.store import Saved
from meshwright.config.duration import Duration, parse_duration
from meshwright.config.schema import CheckpointConfig
from meshwright.errors import EnvironmentProblem, UserError
from meshwright.runtime.heartbeat import Doing, own_heartbeat
from meshwright.step.canonical import Snapshot
from meshwright.trainer.callbacks import CallbackContext, Callbacks
from meshwright.trainer.checkpointer import BackgroundCheckpointer
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.incidents.not_finite import FiniteCheck
from meshwright.trainer.limits import Limits
from meshwright.trainer.run_progress import Meter, Stop, StopReason, Work

__all__ = ["quick_module"]

pytestmark = pytest.mark.usefixtures("quick_module")

ARRAYS = {name: np.asarray(array) for name, array in vectors(32).items()}
TRAINER = mw.Trainer(
    model=lambda rngs: Residuals(1, rngs=rngs),
    loss=square_loss,
    optimizer=optax.sgd(0.05),
    mesh="data=2,fsdp=4",
    log_every=2,
)


@pytest.fixture(scope="module")
def fit(quick_module):
    """Train on `ARRAYS`, assembled once."""
    assembled = TRAINER.assemble({k: v[:16] for k, v in ARRAYS.items()})

    def run(**settings):
        return TRAINER.fit(ARRAYS, batch_size=16, assembled=assembled, restart=True, **settings)

    return run


class Diary(mw.Callback):
    """Notes what it is told."""

    def __init__(self, stop_after=math.inf):
        self.entries = []
        self.stop_after = stop_after

    def on_start(self, step):
        self.entries.append(("start", step))

    def on_log(self, step, values):
        self.entries.append(("log", step))

    def on_eval(self, step, values):
        self.entries.append(("eval", step))

    def on_checkpoint(self, step):
        self.entries.append(("checkpoint", step))

    def on_end(self, step):
        self.entries.append(("end", step))

    def should_stop(self):
        return "enough" if self.entries[-1][1] >= self.stop_after else ""


def test_callbacks_are_told_in_order_and_may_stop_the_run(fit, tmp_path):
    diary = Diary(stop_after=4)
    kept = CheckpointConfig(every=3)
    result = fit(
        steps=9,
        callbacks=[diary],
        eval_data=ARRAYS,
        eval_every=3,
        run_dir=tmp_path,
        checkpoint=kept,
    )
    # Metrics are looked at one step late.
    assert diary.entries == [
        ("start", 0), ("log", 1), ("log", 2), ("eval", 3), ("checkpoint", 3), ("log", 4),
        ("log", 5), ("eval", 5), ("checkpoint", 5), ("end", 5),
    ]  # fmt: skip
    assert (result.steps, result.stopped) == (5, "enough")
    assert list(result.losses) == [1, 2, 4, 5]


def test_two_epochs_are_as_many_steps_as_it_takes(fit):
    assert fit(max_duration="2ep").steps == 4
    assert fit(max_duration="1.2ep").steps == 3
    assert fit(max_duration="5st").steps == 5


def test_time_is_up_when_it_is_up(fit, monkeypatch):
    clock = iter(range(0, 1000, 10))
    # Others read the clock too, so only that of the limits is replaced.
    own = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("meshwright.trainer.limits.time", own)
    result = fit(max_duration="25s")
    assert result.stopped == "25 s have passed"
    # The limits are asked at every look; the first after step 3, and each takes ten seconds.
    assert result.steps == 7


def test_early_stopping_waits_and_then_stops():
    stopping = mw.EarlyStopping(2, min_delta=0.1)
    for loss, said in ((1.0, False), (0.95, False), (0.8, False), (0.75, False), (math.nan, True)):
        stopping.on_eval(0, {"loss": loss})
        assert bool(stopping.should_stop()) == said
    assert "in which loss was not more than 0.1 below 0.8000" in stopping.should_stop()


@pytest.mark.parametrize(("metric", "mode"), [("accuracy", None), ("reward", "max")])
def test_early_stopping_waits_for_a_higher_value(metric, mode):
    stopping = mw.EarlyStopping(2, metric=metric, mode=mode)
    for value, said in ((0.4, False), (0.5, False), (0.45, False), (0.5, True)):
        stopping.on_eval(0, {metric: value})
        assert bool(stopping.should_stop()) == said
    assert f"{metric} was not above 0.5000" in stopping.should_stop()
    with pytest.raises(mw.UserError, match='mode="min" or mode="max"'):
        mw.EarlyStopping(2, mode="highest")


@pytest.mark.full
def test_evaluation_is_the_mean_in_evaluation_mode():
    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.norms = Norms(rngs=rngs)

        def __call__(self, x):
            return self.norms(x)

    trainer = mw.Trainer(
        model=Dropped, loss=square_loss, optimizer=optax.sgd(0.01), mesh="fsdp=4,tensor=2"
    )
    held_out = [{k: v[:16] for k, v in ARRAYS.items()}, {k: v[16:] for k, v in ARRAYS.items()}]
    result = trainer.fit(ARRAYS, batch_size=16, steps=3, eval_data=held_out)
    model = result.model
    model.eval()
    with jax.default_device(jax.devices("cpu")[0]):
        host = jax.tree.map(np.asarray, nnx.state(model, nnx.Not(nnx.RngState)))
        nnx.update(model, host)
        expected = np.mean([float(square_loss(model, batch)) for batch in held_out])
    np.testing.assert_allclose(result.eval_loss, expected, rtol=1e-5)


def test_a_rate_that_waits_for_the_devices_is_not_the_own_work_of_a_process():
    def schedule(count):
        if not isinstance(count, jax.core.Tracer):
            time.sleep(0.02)
        return 0.1

    own = mw.Trainer(
        model=lambda rngs: Residuals(1, rngs=rngs),
        loss=square_loss,
        optimizer=optax.sgd(schedule),
        log_every=1,
    )
    beat = own_heartbeat()
    before = list(beat._seconds)
    own.fit(ARRAYS, batch_size=16, steps=10, progress=False)
    spent = [now - then for now, then in zip(beat._seconds, before, strict=True)]
    assert spent[Doing.WAITING] > 0.2
    assert spent[Doing.CALLBACKS] + spent[Doing.TRAINING] < 0.2


@pytest.mark.full
def test_a_profile_is_taken_on_the_way(tmp_path):
    own = dataclasses.replace(TRAINER)
    own.defaults = FitSettings(profile=True)
    unsaved = CheckpointConfig(enabled=False)
    own.fit(ARRAYS, batch_size=16, steps=10, run_dir=tmp_path, progress=False, checkpoint=unsaved)
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert sum(profile["shares"].values()) == pytest.approx(1.0)
    assert {c["axis"] for c in profile["collectives"]} == {"data×fsdp"}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (once,) = [line for line in lines if "communication_share" in line]
    assert once["communication_share"] == pytest.approx(profile["shares"]["communication"])
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("1000st", Duration(steps=1000)),
        ("2ep", Duration(epochs=2.0)),
        ("30min", Duration(seconds=1800.0)),
        ("1.5h", Duration(seconds=5400.0)),
        ("90 s", Duration(seconds=90.0)),
    ],
)
def test_durations_are_read(text, duration):
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "5", "st", "0st", "1.5st", "-1ep", "3 weeks", "1e3st"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UserError, match="is not a duration"):
        parse_duration(text)


def test_epochs_of_endless_data_cannot_be_counted():
    with pytest.raises(UserError, match="2 epochs cannot be counted"):
        Duration(epochs=2.0).total_steps(num_samples=None, batch_size=4)


def test_the_meter_counts_steps_and_leaves_out_what_is_no_training(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("meshwright.trainer.run_progress.time.perf_counter", lambda: clock[0])
    meter = Meter(Work(samples=8, tokens=80, flops=1000, peak_flops=10_000.0), jax.devices())
    meter.restart(10, waited=1.0)
    clock[0] = 5.0
    meter.exclude(3.0)
    found = meter.read(20, waited=1.5)
    assert found["step_seconds"] == pytest.approx(0.2)
    assert found["samples_per_second"] == pytest.approx(40)
    assert found["tokens_per_second"] == pytest.approx(400)
    assert found["mfu"] == pytest.approx(0.5)
    assert found["input_wait_share"] == pytest.approx(0.25)


NO_CALLBACKS = Callbacks([], CallbackContext(None))


def test_limits_ask_the_callbacks_first():
    assert Limits(5, None, NO_CALLBACKS).stop() is None
    assert Limits(5, 0.0, NO_CALLBACKS).stop() == Stop(StopReason.OUT_OF_TIME, "0 s have passed")


def test_a_signal_to_one_process_interrupts_them_all(monkeypatch):
    others = [None, ["signal", "SIGTERM asked to stop"]]
    monkeypatch.setattr("meshwright.trainer.limits.process_count", lambda: 3)
    monkeypatch.setattr("meshwright.trainer.limits.gather", lambda own: [own, *others])
    limits = Limits(5, 0.0, NO_CALLBACKS)
    assert limits.stop() == Stop(StopReason.SIGNAL, "SIGTERM asked to stop")
    assert limits.stop().interrupted
    # Processes agree on a step before they begin it, and not in the middle of one.
    assert not limits.urgent


class BrokenStore:
    """Fails to save, as a full disk does."""

    def __init__(self):
        self.saved = Saved(5, 0.1, OSError("no space left on device\nsecond line"), "disk full")

    def finished(self):
        return None

    def save(self, *_, **__):
        return self.saved

    def close(self):
        return self.saved


def test_a_failed_save_fails_the_run():
    logged = []
    checkpointer = BackgroundCheckpointer(
        BrokenStore(),
        form=type("Form", (), {"snapshot": staticmethod(lambda state: Snapshot({}, True))})(),
        metadata=lambda step: step,
        every=5,
        last_saved=None,
        log_event=lambda *event: logged.append(event),
    )
    # After a failure of another kind, it is a warning.
    checkpointer.abandon()
    assert logged[0][:3] == ("warning", 5, "step 5 could not be saved: disk full")
    for fails in (lambda: checkpointer.save(None, 10, loss=None), checkpointer.finish):
        with pytest.raises(EnvironmentProblem, match="after 5 steps could not be saved") as found:
            fails()
        assert found.value.why == "disk full"
    checkpointer.abandon()
    assert len(logged) == 1


def test_waiting_for_devices_is_not_told_as_work_of_the_process(fit, tmp_path, monkeypatch):
    """The launcher would otherwise call a process slow that waits for another one."""
    look, doing = FiniteCheck.look, []

    def noting(self, until):
        doing.append(own_heartbeat()._doing)
        look(self, until)

    monkeypatch.setattr(FiniteCheck, "look", noting)
    fit(steps=4, run_dir=tmp_path, checkpoint=CheckpointConfig(every=3))
    assert set(doing) == {Doing.WAITING}


def test_an_evaluation_is_reported_after_the_step_it_follows():
    class Order(mw.Callback):
        def __init__(self):
            self.seen = []

        def on_log(self, step, values):
            self.seen.append(("train", step))

        def on_eval(self, step, values):
            self.seen.append(("eval", step))

    order, own = Order(), dataclasses.replace(TRAINER, log_every=2)
    own.fit(ARRAYS, batch_size=16, steps=4, eval_data=ARRAYS, eval_every=2, callbacks=[order])
    logged = [("train", 1), ("train", 2), ("eval", 2), ("train", 4), ("eval", 4)]
    assert order.seen == logged


def test_early_stopping_by_an_unknown_metric_is_refused_with_the_names():
    own = dataclasses.replace(
        TRAINER, eval_loss=lambda model, batch: (square_loss(model, batch), {"accuracy": 1.0})
    )
    settings = {"batch_size": 16, "steps": 2, "eval_data": ARRAYS, "eval_every": 1}
    with pytest.raises(mw.UserError, match=r"watches 'acuracy'.*\n.*loss, accuracy"):
        own.fit(ARRAYS, callbacks=[mw.EarlyStopping(1, metric="acuracy")], **settings)
    stopping = mw.EarlyStopping(1, metric="accuracy", min_delta=0.5)
    stopped = own.fit(ARRAYS, callbacks=[stopping], **settings).stopped
    assert stopped.endswith("accuracy was not more than 0.5 above 1.0000, the best so far")
