"""From a config to trackers: what is always there, what must be asked for, what is missing."""

import importlib.util
import io
import json
import sys

import pytest
from rich.console import Console

from meshwright.config.schema import TrackingConfig
from meshwright.errors import UserError
from meshwright.tracking import make_trackers

pytestmark = pytest.mark.quick


def test_files_and_lines_are_written_always_and_nothing_to_stdout(tmp_path, capfd):
    trackers = make_trackers(TrackingConfig(), tmp_path, total_steps=2)
    assert list(tmp_path.iterdir()) == []
    trackers.start({"project": "p", "plan": "data=8"})
    trackers.log("train", 1, {"loss": 2.5})
    trackers.event("warning", 1, "slow", {})
    trackers.close({"steps": 1})
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.json", "metrics.jsonl", "events.jsonl", "result.json", "train.log",
    }  # fmt: skip
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split()[0] for line in err.splitlines()] == ["plan", "output", "train", "warning:"]
    logged = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in logged] == err.splitlines()


def test_a_terminal_gets_a_bar_and_the_log_file_the_lines(tmp_path):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    trackers = make_trackers(TrackingConfig(), tmp_path, total_steps=2, console=screen)
    trackers.start({})
    trackers.log("train", 2, {"loss": 2.5})
    trackers.close({})
    assert "━" in screen.file.getvalue()
    assert "train 2/2  loss 2.5000" in (tmp_path / "train.log").read_text()


def test_tensorboard_is_written_beside_the_other_files(tmp_path):
    trackers = make_trackers(TrackingConfig(tensorboard=True), tmp_path, total_steps=2)
    trackers.start({})
    trackers.log("train", 1, {"loss": 2.5})
    trackers.close({})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_told_before_training(name, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted: None if wanted == name else found(wanted)
    )
    config = TrackingConfig.parse({name: True})
    with pytest.raises(UserError, match=rf"pip install 'meshwright\[{name}\]'"):
        make_trackers(config, tmp_path, total_steps=None)


def test_a_folder_named_like_the_package_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="which is not installed"):
        make_trackers(TrackingConfig(wandb=True), tmp_path, total_steps=None)


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.tracking.setup.is_main", lambda: False)
    trackers = make_trackers(TrackingConfig(tensorboard=True), tmp_path, total_steps=1)
    trackers.start({})
    trackers.log("train", 1, {"loss": 1.0})
    trackers.close({"steps": 1})
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_progress_is_shown_where_somebody_looks(capfd):
    tracker = make_trackers(TrackingConfig(), None, total_steps=2, progress=True)
    tracker.start({"plan": "data=8"})
    tracker.log("train", 1, {"loss": 2.5})
    tracker.close({})
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["plan        data=8", "train 1/2  loss 2.5000"]
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    tracker = make_trackers(TrackingConfig(), None, total_steps=2, console=screen)
    tracker.start({})
    tracker.close({})
    assert "waiting for the first step" in screen.file.getvalue()


@pytest.mark.parametrize(("folder", "progress"), [(False, None), (False, False), (True, False)])
def test_warnings_that_nobody_shows_are_pythons_own(folder, progress, tmp_path, capfd):
    place = tmp_path if folder else None
    tracker = make_trackers(TrackingConfig(), place, total_steps=2, progress=progress)
    tracker.start({})
    tracker.log("train", 1, {"loss": 2.5})
    tracker.event("checkpoint", 1, "saved", {})
    with pytest.warns(UserWarning, match="slow") as caught:
        tracker.event("warning", 1, "slow", {})
    tracker.close({})
    assert [warning.filename for warning in caught] == [__file__]
    assert capfd.readouterr() == ("", "")


def test_services_need_a_folder():
    with pytest.raises(UserError, match="run_dir"):
        make_trackers(TrackingConfig(tensorboard=True), None, total_steps=1)


def test_the_settings_are_part_of_the_config():
    shown = json.loads(TrackingConfig().model_dump_json())
    assert shown["log_every"] == 10
    assert not any(shown[name] for name in ("tensorboard", "wandb", "mlflow"))
