"""Tracking with MLflow."""

from __future__ import annotations

import importlib
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
        self._log_settings(service_settings(self._folder, facts))

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

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        param = importlib.import_module("mlflow.entities").Param
        params = [param(key, str(value)[:_MAX_PARAM_LENGTH]) for key, value in settings.items()]
        for at in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _MAX_PARAMS])
