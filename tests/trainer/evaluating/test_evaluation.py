"""Evaluation and prediction: every sample exactly once, on any mesh."""

import threading
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module

import meshwright as mw
from meshwright.errors import UserError
from meshwright.trainer import programs
from meshwright.trainer.evaluating.evaluation import Evaluator

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

MESHES = [
    "fsdp=4,tensor=2",
    # tests/pipeline/execute/test_forward_only.py evaluates on stages every day.
    pytest.param("pipe=2,data=4", marks=pytest.mark.full),
    pytest.param("data=8", marks=pytest.mark.full),
]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.relu(self.up(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_loss(model, batch):
    error = (model(batch["x"]) - batch["y"]) ** 2
    return error.mean(), {"largest": mw.Weighted(error.sum(), error.size / 4)}


def samples(count, seed=1):
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 16)).astype("float32")
    return {"x": x, "y": random.normal(size=(count, 4)).astype("float32")}


@pytest.fixture(scope="module", params=MESHES)
def result(request, quick_module):
    trainer = mw.Trainer(model=Net, loss=mean_loss, optimizer=optax.sgd(0.01), mesh=request.param)
    return trainer.fit(samples(64), steps=2, batch_size=64)


def plain(model, batch):
    """Evaluate the NNX model on the host in one piece."""
    state = jax.tree.map(np.asarray, nnx.state(model, nnx.Not(nnx.RngState)))
    copy = nnx.clone(model)
    nnx.update(copy, state)
    value, metrics = mean_loss(copy, batch)
    return float(value), float(metrics["largest"].total / metrics["largest"].weight)


@pytest.mark.parametrize(
    "count", [*(pytest.param(count, marks=pytest.mark.full) for count in (100, 400)), 3]
)
def test_every_sample_counts_exactly_once(result, count):
    held_out = samples(count)
    values = result.evaluate(held_out)
    loss, largest = plain(result.model, held_out)
    assert values["eval_samples"] == count
    assert values["loss"] == pytest.approx(loss, rel=1e-6)
    assert values["largest"] == pytest.approx(largest, rel=1e-6)


def test_predictions_are_those_of_the_model_in_order_and_give_the_evaluation(result):
    held_out = samples(100)
    predicted = result.predict(held_out, lambda model, batch: model(batch["x"]))
    assert isinstance(predicted, np.ndarray)
    np.testing.assert_allclose(predicted, result.model(held_out["x"]), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(predicted, result.predict(held_out["x"]))
    error = np.mean((predicted.astype("float64") - held_out["y"]) ** 2)
    assert error == pytest.approx(result.evaluate(held_out)["loss"], rel=1e-6)
    batches = [{"x": held_out["x"][:64]}, {"x": held_out["x"][64:]}]
    np.testing.assert_allclose(result.predict(batches), predicted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("result", MESHES[:1], indirect=True)
def test_a_limit_is_said_and_data_without_an_end_need_one(result):
    assert result.evaluate(samples(400), eval_batches=2)["eval_samples"] == 128

    def endless(step, batch_size):
        return samples(batch_size, seed=step)

    with pytest.raises(UserError, match="an evaluation might never end") as caught:
        result.evaluate(endless)
    assert "write eval_batches=16" in caught.value.fix
    assert result.evaluate(endless, eval_batches=1)["eval_samples"] == 64
    with pytest.raises(UserError, match="an evaluation might never end"):
        result.evaluate(samples(8) for _ in range(2))
    with pytest.raises(UserError, match="predictions might never end"):
        result.predict(endless)


@pytest.mark.parametrize("result", MESHES[:1], indirect=True)
def test_wrong_predictions_are_refused(result):
    with pytest.raises(UserError, match="how to call the model") as caught:
        result.predict(samples(8))
    assert caught.value.why == "a batch has x, y"
    with pytest.raises(UserError, match="does not have one row per sample"):
        result.predict(samples(8), lambda model, batch: model(batch["x"]).mean())
    with pytest.raises(UserError, match="other arrays than the training data") as caught:
        result.evaluate({"x": samples(8)["x"]})
    assert "it has x; the loss was trained on x, y" in caught.value.why


@pytest.mark.parametrize("result", MESHES[:1], indirect=True)
def test_the_trained_model_is_one_object_in_evaluation_mode(result):
    x = samples(4)["x"]
    assert result.model is result.model
    np.testing.assert_array_equal(result.model(x), result.model(x))
    result.model.train()
    assert not np.array_equal(result.model(x), result.model(x))
    result.model.eval()
    np.testing.assert_array_equal(result.model(x), result.model(x))


@pytest.fixture
def compiled_in(monkeypatch):
    """The names of the threads that programs are compiled in; those apart can be made to fail."""
    compile_it, threads = jax.stages.Lowered.compile, []

    def compile_and_note(lowered, *args, **options):
        threads.append(threading.current_thread().name)
        if threads[-1].startswith("evaluation") and compiled.fails:
            raise RuntimeError("out of memory")
        return compile_it(lowered, *args, **options)

    compiled = SimpleNamespace(threads=threads, fails=False)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_note)
    return compiled


def small_trainer(**settings):
    return mw.Trainer(
        model=lambda rngs: nnx.Linear(16, 4, rngs=rngs),
        loss=mean_loss,
        optimizer=optax.sgd(0.01),
        mesh="data=8",
        **settings,
    )


@pytest.mark.parametrize("fails", [False, True])
def test_evaluations_are_compiled_in_another_thread_after_the_first_step(compiled_in, fails):
    compiled_in.fails = fails
    held_out, before = samples(67), []
    ran = small_trainer().fit(
        samples(64),
        steps=2,
        batch_size=32,
        eval_data=held_out,
        on_metrics=lambda step, _: before.append(list(compiled_in.threads)) if step == 1 else 0,
    )
    apart = [name for name in compiled_in.threads if name.startswith("evaluation")]
    in_front = [name for name in compiled_in.threads if name in ("step_0", "MainThread")]
    # Two full batches of 32, and a remainder of 3.
    assert len(apart) == 2
    assert len(in_front) == (3 if fails else 1)
    assert before[0][0] == "step_0", "the step comes first"
    assert ran.eval[2]["eval_samples"] == 67
    assert ran.eval_loss == pytest.approx(plain(ran.model, held_out)[0], rel=1e-6)


def test_evaluations_are_compiled_beside_a_step_that_compiles_long(monkeypatch):
    monkeypatch.setattr(programs, "CACHED_SECONDS", 0.01)
    compile_it, evaluation = jax.stages.Lowered.compile, threading.Event()

    def compile_after_evaluation(lowered, *args, **options):
        name = threading.current_thread().name
        if name.startswith("evaluation"):
            evaluation.set()
        elif name.startswith("step"):
            assert evaluation.wait(30), "nothing was compiled beside the step"
        return compile_it(lowered, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_after_evaluation)
    ran = small_trainer().fit(samples(64), steps=1, batch_size=32, eval_data=samples(67))
    assert ran.eval_loss == pytest.approx(plain(ran.model, samples(67))[0], rel=1e-6)


def test_without_data_to_evaluate_on_nothing_is_compiled_ahead(compiled_in):
    small_trainer().fit(samples(64), steps=2, batch_size=32)
    assert compiled_in.threads == ["step_0"]


def test_a_loss_that_cannot_be_evaluated_is_an_error_when_it_is():
    def broken(model, batch):
        raise ZeroDivisionError("in the loss of evaluations")

    trained = []
    trainer = small_trainer(eval_loss=broken, log_every=1)
    with pytest.raises(ZeroDivisionError, match="in the loss of evaluations"):
        trainer.fit(
            samples(64),
            steps=3,
            batch_size=32,
            eval_data=samples(32),
            eval_every=2,
            on_metrics=lambda step, _: trained.append(step),
        )
    # The line of a step comes before that of its evaluation.
    assert trained == [1, 2]


def test_an_evaluation_that_fails_costs_no_step(tmp_path, monkeypatch):
    trainer = mw.Trainer(model=Net, loss=mean_loss, optimizer=optax.sgd(0.01))
    fit = partial(trainer.fit, samples(8), batch_size=8, run_dir=tmp_path, eval_data=samples(8, 2))

    def fail(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "__call__", fail)
        with pytest.raises(ZeroDivisionError):
            fit(steps=3)
    resumed = fit(steps=4)
    assert list(resumed.losses) == [4]
