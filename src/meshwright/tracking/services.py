"""Tracking with TensorBoard, Weights & Biases and MLflow."""

import hashlib
import importlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.tracking.run_files import run_name, service_settings
from meshwright.tracking.tracker import Tracker

_MAX_PARAMS = 100
"""Parameters MLflow takes in one request."""
_MAX_PARAM_LENGTH = 500


class MlflowTracker(Tracker):
    """Sends metrics, but no events, to an MLflow experiment named after the run's project.

    The run folder stores the run id for a resumed run.
    """

    def __init__(self, folder: Path, *, uri: str | None = None) -> None:
        self._folder = folder
        self._uri = uri
        self._client: Any = None
        self._id = ""

    def start(self, facts: Mapping[str, Any]) -> None:
        """Open the run, or resume it."""
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self._uri)
        id_file = self._folder / "mlflow_run_id"
        if id_file.exists():
            self._id = id_file.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        project = str(facts.get("project", "meshwright"))
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        run = self._client.create_run(experiment, run_name=run_name(self._folder, facts))
        self._id = run.info.run_id
        id_file.write_text(self._id + "\n")
        param = importlib.import_module("mlflow.entities").Param
        settings = service_settings(self._folder, facts)
        params = [param(key, str(value)[:_MAX_PARAM_LENGTH]) for key, value in settings.items()]
        for at in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _MAX_PARAMS])

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics."""
        metric = importlib.import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        metrics = [metric(f"{split}/{k}", float(v), now, step) for k, v in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, result: Mapping[str, Any]) -> None:
        """End the run, as failed if there is no result, or it says so."""
        if self._id:
            failed = result.get("failed", not result)
            self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


INIT_TIMEOUT_SECONDS = 60
"""How long a service that does not answer may delay the start."""


class WandbTracker(Tracker):
    """Sends metrics to a W&B project named after the run's; its id follows from the run folder."""

    def __init__(self, folder: Path, *, entity: str | None = None) -> None:
        self._folder = folder
        self._entity = entity
        self._run: Any = None

    def start(self, facts: Mapping[str, Any]) -> None:
        """Open the run, or resume it."""
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=str(facts.get("project", "meshwright")),
            entity=self._entity,
            id=hashlib.sha256(str(self._folder.absolute()).encode()).hexdigest()[:16],
            name=run_name(self._folder, facts),
            dir=str(self._folder),
            config=service_settings(self._folder, facts),
            resume="allow",
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_SECONDS),
        )
        # W&B's own step only grows, but a run resumed from a checkpoint goes back.
        self._run.define_metric("*", step_metric="step")

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Hand the metrics to W&B, which sends them in the background."""
        self._run.log({"step": step, **{f"{split}/{k}": v for k, v in values.items()}})

    def event(self, kind: str, step: int, message: str, details: Mapping[str, Any]) -> None:
        """Show a warning as an alert; other events stay in the run folder."""
        if kind in ("warning", "incident") and self._run is not None:
            self._run.alert(title="meshwright", text=message)

    def close(self, result: Mapping[str, Any]) -> None:
        """Note the result and end the run, as failed if there is none, or it says so."""
        if self._run is not None:
            self._run.summary.update(dict(result))
            self._run.finish(exit_code=1 if result.get("failed", not result) else 0)


class TensorBoardTracker(Tracker):
    """Writes ``train/loss`` and the like, but no events, to ``tensorboard/`` in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, facts: Mapping[str, Any]) -> None:
        """Open an event file; TensorBoard reads those of a folder one after the other."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # The queue is long, because a full queue would make training wait for the disk.
        self._writer = EventFileWriter(str(self._folder), max_queue_size=1000, flush_secs=10)

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Write each metric as a scalar at this step."""
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        scalars = [
            summaries.Summary.Value(tag=f"{split}/{name}", simple_value=value)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        summary = summaries.Summary(value=scalars)
        self._writer.add_event(events.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self, result: Mapping[str, Any]) -> None:
        """Write what is queued and close the file."""
        if self._writer is not None:
            self._writer.close()
