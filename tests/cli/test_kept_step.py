"""A later run reads the program of its step from the cache, unless anything in it is another."""

import json
import sys

import pytest
from quick import quick_module

from meshwright.cli.main import main
from meshwright.runtime import user_code
from meshwright.step.train_step import TrainStep

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module", "own_disk_cache")

SETTINGS = ("model=mlp", "model.widths=[784,16,10]", "mesh.fsdp=8", "training.global_batch_size=8")
QUICK = ("training.steps=2", "training.eval_batches=1", "checkpoint.enabled=false")
OWN = """
from meshwright.tasks.classification import Classification
class Mine(Classification):
    pass
"""


class Traced(Exception):
    """The step was traced."""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train with a cache; return the metrics and the ledger, without what depends on the clock."""
    monkeypatch.setattr(user_code, "_own_roots", type(user_code._own_roots)())

    def call(name, *more, cache=True):
        folder = tmp_path / name
        kept = f"compilation_cache={tmp_path / 'programs' if cache else 'false'}"
        words = ["train", *SETTINGS, *QUICK, kept, f"hydra.run.dir={folder}", *more]
        if main(words):
            raise Traced
        ledger = json.loads((folder / "ledger.json").read_text())
        assert ledger.pop("compile_seconds") >= 0
        result = json.loads((folder / "result.json").read_text())
        return result["final_loss"], ledger

    return call


@pytest.fixture
def never_traced(monkeypatch):
    """Return what lets every tracing of a step fail from then on."""

    def update(*_):
        raise Traced

    return lambda: monkeypatch.setattr(TrainStep, "_update", update)


def test_a_step_is_traced_once_and_again_where_anything_differs(train, never_traced):
    expected = train("without", cache=False)
    assert train("first") == expected
    never_traced()
    assert train("second") == expected
    for change in ("optimizer.learning_rate=0.5", "model.widths=[784,8,10]"):
        with pytest.raises(Traced):
            train("other", change)


def test_code_that_a_config_names_is_traced_every_time(train, never_traced, tmp_path, monkeypatch):
    (tmp_path / "own_kept.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    train("first", "task.kind=own_kept:Mine")
    never_traced()
    with pytest.raises(Traced):
        train("second", "task.kind=own_kept:Mine")
