"""A second fit goes on where the first ended, without compiling again; signals end a fit."""

import os
import signal

import jax
import numpy as np
import optax
import pytest
from quick import quick_module
from small_models import Residuals, square_loss, vectors

import meshwright as mw
from meshwright.errors import UserError

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

ARRAYS = {name: np.asarray(array) for name, array in vectors(40).items()}


def trainer(**settings) -> mw.Trainer:
    defaults = {
        "model": lambda rngs: Residuals(1, rngs=rngs),
        "loss": square_loss,
        "optimizer": optax.adam(0.01),
        "mesh": "data=2,fsdp=4",
        "log_every": 1,
    }
    return mw.Trainer(**{**defaults, **settings})


def arrays(result):
    return [np.asarray(x) for x in jax.tree.leaves(result.state)]


@pytest.fixture(scope="module")
def whole(quick_module):
    """Six steps in one go."""
    return trainer().fit(ARRAYS, steps=6, batch_size=16)


def compiled(caplog, function):
    """Return the result of a function, and the names of what JAX compiled for it."""
    # In all threads, unlike jax.log_compiles(): the step compiles in another one.
    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level("WARNING", logger="jax"):
            caplog.clear()
            result = function()
    finally:
        jax.config.update("jax_log_compiles", False)
    names = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    return result, names


def test_a_second_fit_goes_on_bit_for_bit_without_compiling(whole, caplog):
    given = trainer()
    settings = {"batch_size": 16, "eval_data": ARRAYS}
    first, names = compiled(caplog, lambda: given.fit(ARRAYS, steps=3, **settings))
    assert any("_update" in name for name in names)
    before = arrays(first)
    second, names = compiled(caplog, lambda: given.fit(ARRAYS, steps=6, **settings))
    assert names == []
    assert list(first.losses | second.losses) == [1, 2, 3, 4, 5, 6]
    assert (first.losses | second.losses) == whole.losses
    for ours, expected in zip(arrays(second), arrays(whole), strict=True):
        np.testing.assert_array_equal(ours, expected)
    # The first result is still there, and still what it was.
    for ours, expected in zip(arrays(first), before, strict=True):
        np.testing.assert_array_equal(ours, expected)
    with pytest.warns(UserWarning, match="already done 6 steps, and nothing was trained"):
        assert given.fit(ARRAYS, steps=6, **settings).steps == 6
    again = given.fit(ARRAYS, steps=3, restart=True, **settings)
    assert again.losses == first.losses


@pytest.mark.full
def test_another_batch_size_goes_on_and_another_optimizer_does_not(whole):
    given = trainer()
    given.fit(ARRAYS, steps=2, batch_size=16)
    result = given.fit(ARRAYS, steps=3, batch_size=32)
    assert (list(result.losses), result.steps) == ([3], 3)
    given.optimizer = optax.sgd(0.1)
    with pytest.raises(UserError, match="not the one of the last fit"):
        given.fit(ARRAYS, steps=4, batch_size=32)


def test_a_generator_is_read_on(whole):
    rows = [{k: v[n : n + 8] for k, v in ARRAYS.items()} for n in range(0, 40, 8)]
    stream, given = iter(rows), trainer()
    first = given.fit(stream, steps=2)
    second = given.fit(stream, steps=5)
    expected = trainer().fit(rows, steps=5)
    assert (first.losses | second.losses) == expected.losses


def test_a_run_folder_and_memory_must_not_disagree(tmp_path):
    given = trainer()
    settings = {"batch_size": 16, "run_dir": tmp_path}
    given.fit(ARRAYS, steps=2, **settings)
    continued = given.fit(ARRAYS, steps=3, **settings)
    assert (continued.steps, continued.steps_before) == (3, 2)
    assert str(continued).startswith("trained 1 step (3 steps in all) of 16 samples on ")
    given.fit(ARRAYS, steps=4, batch_size=16)
    with pytest.raises(UserError, match="not clear where to continue") as caught:
        given.fit(ARRAYS, steps=5, **settings)
    assert "done 4 steps, and the newest checkpoint in the run folder is of step 3" in str(
        caught.value
    )
    assert list(given.fit(ARRAYS, steps=5, resume="must", **settings).losses) == [4, 5]


class Signal(mw.Callback):
    def __init__(self, number):
        self.number = number

    def on_log(self, step, values):
        if step == 2:
            os.kill(os.getpid(), self.number)


def test_ctrl_c_saves_and_raises_and_the_run_goes_on(whole, tmp_path):
    given = trainer()
    settings = {"steps": 6, "batch_size": 16, "run_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt, match=f"after step 3; its state is in {tmp_path}"):
        given.fit(ARRAYS, callbacks=[Signal(signal.SIGINT)], **settings)
    assert (tmp_path / "checkpoints/3").is_dir()
    assert given.result.steps == 3
    values = given.evaluate(ARRAYS)
    assert values["eval_samples"] == 40
    assert trainer().evaluate(ARRAYS, of=tmp_path) == values
    assert trainer().fit(ARRAYS, **settings).losses == {n: whole.losses[n] for n in (4, 5, 6)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preemption_ends_the_process_with_75(number):
    with pytest.raises(SystemExit) as caught:
        trainer().fit(ARRAYS, steps=6, batch_size=16, callbacks=[Signal(number)])
    assert caught.value.code == 75


def test_sigusr1_keeps_the_handler_of_a_program_that_uses_it_itself(whole):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        result = trainer().fit(ARRAYS, steps=6, batch_size=16, callbacks=[Signal(signal.SIGUSR1)])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (heard, result.losses) == ([signal.SIGUSR1], whole.losses)


def test_a_callback_as_documented_survives_a_resume(tmp_path):
    class Patience(mw.Callback):
        small = False

        def on_log(self, step, values):
            self.small = values["grad_norm"] < 1e-3

        def should_stop(self):
            return "the gradient is small" if self.small else ""

    for steps in (1, 2):
        settings = {"batch_size": 16, "run_dir": tmp_path, "callbacks": [Patience()]}
        assert trainer().fit(ARRAYS, steps=steps, **settings).steps == steps


def test_before_training_there_is_nothing_to_predict_with():
    with pytest.raises(UserError, match="there is no trained model yet"):
        trainer().predict(ARRAYS)
