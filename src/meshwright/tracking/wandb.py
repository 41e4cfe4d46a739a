"""Tracking with Weights & Biases."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.tracking.run_files import run_name, service_settings
from meshwright.tracking.tracker import Tracker

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
