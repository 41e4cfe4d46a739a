"""`mesh=auto` and `training.micro_batch_size=auto`: what the planner chooses is what runs."""

import json

import pytest
import yaml
from closed_form import ClosedForm

from meshwright.cli.main import main

SMALL = ClosedForm(blocks=4, hidden=64, heads=4, vocabulary=256, tokens=8192)
MLP = ("model=mlp", "data=synthetic", "training.steps=1", "checkpoint=none", "hydra.run.dir=run")


@pytest.fixture
def run(capfd, monkeypatch, tmp_path):
    """Run a command in an empty folder, with an estimator that is arithmetic."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("meshwright.cli.auto_settings.config_estimator", lambda *_: SMALL)

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.full
def test_the_mesh_is_chosen_and_the_reason_is_one_line(run, tmp_path):
    code, _, err = run("train", *MLP, "mesh=auto", "training.global_batch_size=32")
    assert code == 0
    (line,) = [line for line in err.splitlines() if line.startswith("mesh=auto: ")]
    assert (
        "data=8, 1 microbatch of 4 samples; data parallel: a whole copy fits on each device" in line
    )
    assert "per device, estimated for 8xCPU" in line
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    assert plan["mesh"] == {"data": 8}
    assert plan["batch"]["micro_batch_size"] == 4
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["mesh"]["auto"], saved["mesh"]["data"]) == (False, 8)
    origins = json.loads((tmp_path / "run" / "config.json").read_text())
    by_key = {each["key"]: each["from"] for each in origins}
    assert by_key["mesh.data"] == "chosen by the planner"


def test_sizes_that_are_set_are_kept(run):
    argv = ("inspect", *MLP, "mesh=auto", "mesh.fsdp=4", "training.global_batch_size=32", "--json")
    code, out, err = run(*argv)
    assert code == 0
    assert json.loads(out)["mesh"] == {"data": 2, "fsdp": 4}
    assert "mesh=auto: data=2 × fsdp=4" in err


def test_the_microbatch_is_chosen_for_the_given_mesh(run):
    argv = ("mesh.fsdp=4", "training.global_batch_size=32", "training.micro_batch_size=auto")
    code, out, err = run("inspect", *MLP, *argv, "--json")
    plan = json.loads(out)["plan"]
    assert code == 0
    assert plan["mesh"] == {"data": 2, "fsdp": 4}
    assert plan["batch"]["micro_batch_size"] == 4
    assert plan["sharding"]["remat"] == "none"
    assert "training.micro_batch_size=auto: data=2 × fsdp=4, 1 microbatch of 4 samples; " in err


def test_other_words_than_auto_are_refused(run):
    code, _, err = run("config", "training.micro_batch_size=large")
    assert code == 2
    assert "training.micro_batch_size" in err
