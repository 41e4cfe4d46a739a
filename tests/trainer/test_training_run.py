"""A training run is checked when it is made, and nothing is written before all checks passed."""

import dataclasses

import numpy as np
import optax
import pytest
from small_models import Residuals, square_loss, vectors

import meshwright as mw
from meshwright.config.duration import Duration
from meshwright.data.user_data import as_data
from meshwright.errors import UserError
from meshwright.trainer import training_run
from meshwright.trainer.run_spec import EvaluationSpec, OutputSpec, RunSpec
from meshwright.trainer.training_run import TrainingRun

ARRAYS = {name: np.asarray(array) for name, array in vectors(32).items()}
BATCH = {name: array[:16] for name, array in ARRAYS.items()}


@pytest.fixture(scope="module")
def assembled():
    trainer = mw.Trainer(
        model=lambda rngs: Residuals(1, rngs=rngs),
        loss=square_loss,
        optimizer=optax.sgd(0.05),
        mesh="data=2,fsdp=4",
    )
    return trainer.assemble(BATCH)


@pytest.fixture
def spec(assembled, tmp_path):
    return RunSpec(
        assembled=assembled,
        loss=square_loss,
        batch=BATCH,
        data=as_data(ARRAYS),
        duration=Duration(updates=2),
        seed=0,
        initial_state=lambda: assembled.init(0),
        output=OutputSpec(run_dir=tmp_path / "run", files={"note.txt": "written first"}),
    )


EARLY = [mw.EarlyStopping(2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"callbacks": EARLY}, "there is no data to evaluate on"),
        (
            {"callbacks": EARLY, "evaluation": EvaluationSpec(data=as_data(ARRAYS))},
            "there is only one, at the end",
        ),
        (
            {"evaluation": EvaluationSpec(data=as_data(lambda step, batch_size: BATCH))},
            "an evaluation might never end",
        ),
        (
            {"data": as_data(iter([BATCH])), "duration": Duration(epochs=2.0)},
            "2 epochs need data that can be read again",
        ),
    ],
)
def test_a_run_that_cannot_run_is_not_made_and_writes_nothing(spec, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        TrainingRun(dataclasses.replace(spec, **changes))
    assert not list(tmp_path.iterdir())


def test_a_missing_tracker_is_noticed_before_anything_is_written(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.tracking.setup.importlib.util.find_spec", lambda name: None)
    output = dataclasses.replace(spec.output, tracking=mw.TrackingConfig(wandb=True))
    with pytest.raises(UserError, match="needs the package `wandb`"):
        TrainingRun(dataclasses.replace(spec, output=output))
    assert not list(tmp_path.iterdir())


def test_the_run_folder_is_made_before_the_step_is_compiled(spec, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def compile_step(*_):
        assert (tmp_path / "run" / "note.txt").read_text() == "written first"
        raise Stop

    monkeypatch.setattr(training_run, "compile_step", compile_step)
    with pytest.raises(Stop):
        TrainingRun(spec).run()


def test_a_spec_cannot_be_changed(spec):
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.seed = 1
