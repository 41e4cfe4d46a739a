"""A training run is checked when it is made, and nothing is written before all checks passed."""

import numpy as np
import optax
import pytest
from small_models import Residuals, square_loss, vectors

import meshwright as mw
from meshwright.errors import UserError
from meshwright.trainer import training_run
from meshwright.trainer.fit_settings import FitSettings

ARRAYS = {name: np.asarray(array) for name, array in vectors(32).items()}
BATCH = {name: array[:16] for name, array in ARRAYS.items()}
EARLY = [mw.EarlyStopping(2)]
TRAINER = mw.Trainer(
    model=lambda rngs: Residuals(1, rngs=rngs),
    loss=square_loss,
    optimizer=optax.sgd(0.05),
    mesh="data=2,fsdp=4",
)


@pytest.fixture(scope="module")
def assembled():
    return TRAINER.assemble(BATCH)


@pytest.fixture
def fit(assembled, tmp_path):
    def run(data=ARRAYS, **settings):
        settings = {"steps": 2, "run_dir": tmp_path / "run", **settings}
        size = 16 if data is ARRAYS else None
        return TRAINER.fit(data, batch_size=size, assembled=assembled, **settings)

    return run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"callbacks": EARLY}, "there is no data to evaluate on"),
        ({"callbacks": EARLY, "eval_data": ARRAYS}, "there is only one, at the end"),
        ({"eval_data": lambda step, batch_size: BATCH}, "an evaluation might never end"),
        (
            {"data": iter([BATCH]), "steps": None, "epochs": 2.0},
            "2 epochs need data that can be read again",
        ),
    ],
)
def test_a_run_that_cannot_run_is_not_made_and_writes_nothing(fit, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        fit(**settings)
    assert not list(tmp_path.iterdir())


def test_a_missing_tracker_is_noticed_before_anything_is_written(fit, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.tracking.setup.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package `wandb`"):
        fit(tracking=mw.TrackingConfig(wandb=True))
    assert not list(tmp_path.iterdir())


def test_the_run_folder_is_made_before_the_step_is_compiled(fit, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def compile_step(assembled, _, **_others):
        assert (tmp_path / "run" / "note.txt").read_text() == "written first"
        written = (tmp_path / "run" / "plan.yaml").read_text()
        assert mw.Plan.from_yaml(written) == assembled.plan
        raise Stop

    monkeypatch.setattr(training_run, "compile_step", compile_step)
    monkeypatch.setattr(TRAINER, "defaults", FitSettings(files={"note.txt": "written first"}))
    with pytest.raises(Stop):
        fit()
