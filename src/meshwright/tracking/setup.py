"""The trackers of a run, from its config."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.config.schema import TrackingConfig
from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import is_main
from meshwright.runtime.activity import show_activities
from meshwright.tracking.log_lines import LineTracker, LogFile, WarningsOnly
from meshwright.tracking.run_files import RunFiles
from meshwright.tracking.tracker import Background, Tracker, Trackers

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = ("tensorboard", "wandb", "mlflow")
"""Trackers that need an optional package; config key, extra and package share a name."""


def make_trackers(
    config: TrackingConfig,
    folder: Path | None,
    *,
    total_steps: int | None,
    console: Console | None = None,
    progress: bool | None = None,
) -> Tracker:
    """Return the tracker of a run in ``folder``, which exists; nothing is written yet.

    A missing package is an error here, before training. Later errors stop one tracker, not the
    run. By default, progress is shown on stderr for a run with a folder or a terminal; without it,
    warnings go to Python's `warnings`.
    """
    check_tracking(config, folder)
    if not is_main():
        return Tracker()
    shown = _make_console(console, folder, total_steps, progress)
    if folder is None:
        return shown
    trackers: dict[str, Tracker] = {
        "files": RunFiles(folder),
        "train.log": LogFile(folder, total_steps=total_steps),
        "console": shown,
    }
    from meshwright.tracking.services import MlflowTracker, TensorBoardTracker, WandbTracker

    if config.tensorboard:
        trackers["tensorboard"] = TensorBoardTracker(folder)
    if config.wandb:
        trackers["wandb"] = WandbTracker(folder, entity=config.wandb_entity)
    if config.mlflow:
        # W&B sends in the background; MLflow's client waits and retries for minutes.
        trackers["mlflow"] = Background(MlflowTracker(folder, uri=config.mlflow_uri))
    return Trackers(trackers)


def shows_progress(folder: Path | None, progress: bool | None, *, terminal: bool) -> bool:
    """Whether a run shows its progress; ``progress`` is what was asked for."""
    return (folder is not None or terminal) if progress is None else progress


def shown_activities(folder: Path | None, progress: bool | None) -> AbstractContextManager[None]:
    """Show on stderr what takes long inside, if the run shows its progress."""
    shown = shows_progress(folder, progress, terminal=sys.stderr.isatty())
    return show_activities() if shown and is_main() else nullcontext()


def check_tracking(config: TrackingConfig, folder: Path | None) -> None:
    """Raise if a tracker's package is missing, or the run folder it needs."""
    enabled = _enabled(config)
    for name in enabled:
        spec = importlib.util.find_spec(name)
        # A folder of that name in the working directory, such as W&B's own, is not the package.
        if spec is None or spec.origin is None:
            raise UserError(
                f"{Setting(f'tracking.{name}', True)} needs the package `{name}`, which is not "
                "installed",
                fix=f"pip install 'meshwright[{name}]', or leave it out",
            )
    if folder is None and enabled:
        raise UserError(
            f"{Setting(f'tracking.{enabled[0]}', True)} needs the folder of a run",
            fix=f"write {Setting('hydra.run.dir', ANY)} too",
        )


def _enabled(config: TrackingConfig) -> list[str]:
    return [name for name in EXTRAS if getattr(config, name)]


def _make_console(
    console: Console | None, folder: Path | None, total_steps: int | None, progress: bool | None
) -> Tracker:
    from rich.console import Console
    from rich.text import Text

    screen = console or Console(stderr=True, highlight=False)
    if not shows_progress(folder, progress, terminal=screen.is_terminal):
        return WarningsOnly()
    if screen.is_terminal:
        from meshwright.tracking.progress import ProgressTracker

        return ProgressTracker(screen, folder, total_steps=total_steps)
    # Soft wrapping keeps each message on one line, so that logs can be searched.
    return LineTracker(
        lambda line: screen.print(Text(line), soft_wrap=True), folder, total_steps=total_steps
    )
