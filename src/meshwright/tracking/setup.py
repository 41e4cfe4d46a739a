"""From a config to the trackers of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.config.schema import TrackingConfig
from meshwright.errors import UserError
from meshwright.processes import is_main
from meshwright.tracking.log_lines import LineTracker, LogFile, WarningsOnly
from meshwright.tracking.run_files import RunFiles
from meshwright.tracking.tracker import NullTracker, Tracker, Trackers

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = ("tensorboard", "wandb", "mlflow")
"""Trackers that need a package of their own; setting, extra and package have one name."""


def make_trackers(
    config: TrackingConfig,
    folder: Path | None,
    *,
    total_updates: int | None,
    console: Console | None = None,
    progress: bool | None = None,
) -> Tracker:
    """Return what tells about a run in ``folder``, which exists; nothing is written yet.

    A package that is missing is an error here, before anything is trained. What goes wrong
    later stops one tracker, not the run.

    Args:
        config: which trackers besides the files and the screen.
        folder: the run folder; None for a run that is not written down.
        total_updates: how many updates there will be, or None if only time will tell.
        console: where progress is shown; stderr by default.
        progress: whether it is shown; None shows it if the run is written down or on a terminal.
            Where it is not shown, warnings are Python's.
    """
    wanted = [name for name in EXTRAS if getattr(config, name)]
    for name in wanted:
        _check_installed(name)
    if folder is None and wanted:
        raise UserError(
            f"tracking.{wanted[0]} needs the folder of a run", fix="write run_dir=… too"
        )
    if not is_main():
        return NullTracker()
    told = _make_console(console, folder, total_updates, progress)
    if folder is None:
        return told
    trackers: dict[str, Tracker] = {
        "files": RunFiles(folder),
        "train.log": LogFile(folder, total_updates=total_updates),
        "console": told,
    }
    makers = _makers(config, folder)
    return Trackers(trackers | {name: makers[name]() for name in wanted})


def _makers(config: TrackingConfig, folder: Path) -> dict[str, Callable[[], Tracker]]:
    from meshwright.tracking.background import Background
    from meshwright.tracking.mlflow import MlflowTracker
    from meshwright.tracking.tensorboard import TensorBoardTracker
    from meshwright.tracking.wandb import WandbTracker

    return {
        "tensorboard": lambda: TensorBoardTracker(folder),
        "wandb": lambda: WandbTracker(folder, entity=config.wandb_entity),
        # W&B sends on its own time; MLflow's client waits for the server, and retries for minutes.
        "mlflow": lambda: Background(MlflowTracker(folder, uri=config.mlflow_uri)),
    }


def _make_console(
    console: Console | None,
    folder: Path | None,
    total_updates: int | None,
    progress: bool | None,
) -> Tracker:
    from rich.console import Console
    from rich.text import Text

    screen = console or Console(stderr=True, highlight=False)
    if progress is None:
        progress = folder is not None or screen.is_terminal
    if not progress:
        return WarningsOnly()
    if screen.is_terminal:
        from meshwright.tracking.progress import ProgressTracker

        return ProgressTracker(screen, folder, total_updates=total_updates)
    # Soft wrapping keeps a line one line, for whoever searches in a log.
    return LineTracker(
        lambda line: screen.print(Text(line), soft_wrap=True), folder, total_updates=total_updates
    )


def _check_installed(name: str) -> None:
    spec = importlib.util.find_spec(name)
    # A folder of that name in the working directory, such as W&B's own, is no package.
    if spec is None or spec.origin is None:
        raise UserError(
            f"tracking.{name}=true needs the package `{name}`, which is not installed",
            fix=f"pip install 'meshwright[{name}]', or leave out tracking.{name}",
        )
