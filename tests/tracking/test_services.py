"""TensorBoard's files read back; W&B and MLflow told through stand-ins of their packages."""

import importlib.machinery
import json
import sys
import threading
import types

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from meshwright.tracking.services import MlflowTracker, TensorBoardTracker, WandbTracker
from meshwright.tracking.tracker import Background, Tracker, Trackers

pytestmark = pytest.mark.quick


def install(monkeypatch, name, **members):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="fake")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_tensorboard_reads_the_scalars_and_needs_no_other_framework(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.start({})
    tracker.log("train", 1, {"loss": 2.5, "mfu": 0.5})
    tracker.log("eval", 10, {"loss": float("nan"), "accuracy": 0.25})
    tracker.close({})
    (file,) = (tmp_path / "tensorboard").iterdir()
    read = {
        (value.tag, event.step): round(value.tensor.float_val[0], 6)
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert read == {("train/loss", 1): 2.5, ("train/mfu", 1): 0.5, ("eval/accuracy", 10): 0.25}
    assert not {"tensorflow", "torch"} & set(sys.modules)


class FakeWandbRun:
    def __init__(self):
        self.logged, self.alerts, self.summary, self.code = [], [], {}, None

    def define_metric(self, name, step_metric):
        self.metric = (name, step_metric)

    def log(self, values):
        self.logged.append(values)

    def alert(self, title, text):
        self.alerts.append(text)

    def finish(self, exit_code):
        self.code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    runs = []

    def init(**arguments):
        run = FakeWandbRun()
        run.arguments = arguments
        runs.append(run)
        return run

    install(monkeypatch, "wandb", init=init, Settings=dict)
    return runs


def test_wandb_gets_project_settings_metrics_and_result(wandb, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps([{"key": "mesh.fsdp", "value": 4}]))
    tracker = WandbTracker(tmp_path, entity="team")
    tracker.start({"project": "p", "name": "first", "plan": "fsdp=4", "sharding": [1] * 1000})
    tracker.log("train", 5, {"loss": 2.5})
    tracker.event("warning", 5, "slow", {})
    tracker.close({"steps": 5})
    (run,) = wandb
    assert (run.arguments["project"], run.arguments["entity"]) == ("p", "team")
    assert run.arguments["name"] == "first"
    assert run.arguments["config"] == {"mesh.fsdp": 4, "run_plan": "fsdp=4"}
    assert run.metric == ("*", "step")
    assert run.logged == [{"step": 5, "train/loss": 2.5}]
    assert run.alerts == ["slow"]
    assert (run.summary, run.code) == ({"steps": 5}, 0)


def test_wandb_goes_on_with_the_run_of_the_same_folder_and_marks_failures(wandb, tmp_path):
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        tracker = WandbTracker(folder)
        tracker.start({})
        tracker.close({})
    ids = [run.arguments["id"] for run in wandb]
    assert ids[0] == ids[1] != ids[2]
    assert [run.code for run in wandb] == [1, 1, 1]


class FakeMlflow:
    """A server that remembers; its methods are those of MlflowClient."""

    def __init__(self):
        self.experiments, self.metrics, self.params, self.statuses = [], [], {}, {}

    def get_experiment_by_name(self, name):
        found = name in self.experiments
        return types.SimpleNamespace(experiment_id=name) if found else None

    def create_experiment(self, name):
        self.experiments.append(name)
        return name

    def create_run(self, experiment, run_name):
        number = f"run{len(self.statuses)}"
        self.statuses[number] = "RUNNING"
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=number))

    def update_run(self, number, status):
        self.statuses[number] = status

    def log_batch(self, number, metrics=(), params=()):
        assert len(params) <= 100
        self.metrics += metrics
        self.params.update(params)

    def set_terminated(self, number, status):
        self.statuses[number] = status


@pytest.fixture
def mlflow(monkeypatch):
    server = FakeMlflow()
    server.uris = []
    install(
        monkeypatch,
        "mlflow",
        MlflowClient=lambda tracking_uri: (server.uris.append(tracking_uri), server)[1],
    )
    install(
        monkeypatch,
        "mlflow.entities",
        Metric=lambda name, value, time, step: (name, value, step),
        Param=lambda key, value: (key, value),
    )
    return server


def test_mlflow_gets_one_run_that_goes_on(mlflow, tmp_path):
    keys = [{"key": f"k{i}", "value": "x" * 1000} for i in range(150)]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    for step, result in ((5, {}), (10, {"steps": 10})):
        tracker = MlflowTracker(tmp_path, uri="http://server")
        tracker.start({"project": "p"})
        tracker.log("train", step, {"loss": 1.0})
        tracker.close(result)
    assert mlflow.experiments == ["p"]
    assert mlflow.uris == ["http://server"] * 2
    assert mlflow.metrics == [("train/loss", 1.0, 5), ("train/loss", 1.0, 10)]
    assert mlflow.statuses == {"run0": "FINISHED"}
    assert len(mlflow.params) == 150
    assert {len(value) for value in mlflow.params.values()} == {500}


def test_a_slow_service_holds_nothing_up_and_hears_everything_in_order():
    gate, heard = threading.Event(), []

    class Slow(Tracker):
        def start(self, facts):
            gate.wait()

        def log(self, split, step, values):
            heard.append(step)

        def close(self, result):
            heard.append(result)

    tracker = Background(Slow())
    tracker.start({})
    for step in range(100):
        tracker.log("train", step, {})
    assert heard == []
    gate.set()
    tracker.close({"steps": 100})
    assert heard == [*range(100), {"steps": 100}]


def test_a_service_that_fails_or_hangs_ends_as_one_warning():
    class Failing(Tracker):
        def log(self, split, step, values):
            raise ConnectionError("refused")

    class Hanging(Tracker):
        def close(self, result):
            threading.Event().wait(30)

    warnings = []

    class Listener(Tracker):
        def event(self, kind, step, message, details):
            warnings.append(message)

    trackers = Trackers(
        {
            "listener": Listener(),
            "failing": Background(Failing()),
            "hanging": Background(Hanging(), close_seconds=0.01),
        }
    )
    trackers.start({})
    trackers.log("train", 1, {})
    trackers.close({})
    assert sorted(warnings) == [
        "tracking by failing stopped: refused",
        "tracking by hanging stopped: it did not answer within 0.01 s",
    ]
