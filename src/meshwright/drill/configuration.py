"""The configuration that is drilled: the user's settings, cut down to a few updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.config.compose import quoted

FEWEST_STEPS = 6
"""Two checkpoints before a fault, and updates after it."""
DEFAULT_STEPS = 8

_CUT_DOWN = (
    "training.max_duration=null",
    "training.eval_every=null",
    "training.eval_loss=null",
    "training.early_stopping_patience=null",
    "training.sample_tokens=0",
    "training.profile_communication=false",
    "data.eval_fraction=0",
    "data.eval_path=null",
    "tracking.log_every=1",
    "tracking.tensorboard=false",
    "tracking.wandb=false",
    "tracking.mlflow=false",
    "checkpoint.enabled=true",
    # All of them are kept, so that one that is missing was lost.
    "checkpoint.keep_last=1000000",
    "checkpoint.keep_best=0",
    "resume=auto",
)
"""Settings of a drill: no evaluations or trackers, and every update and checkpoint is kept."""


@dataclass(frozen=True)
class Configuration:
    """The run that is drilled.

    Attributes:
        words: what the user wrote: settings, and flags that say which config they change.
        nprocs: the number of processes.
        devices: devices of each process; None leaves them to the machine.
        steps: updates of a run.
        cache: the folder of compiled programs; None for none.
    """

    words: tuple[str, ...]
    nprocs: int
    devices: int | None
    steps: int
    cache: Path | None = None

    @property
    def every(self) -> int:
        """Updates between two checkpoints."""
        return self.steps // 4 if self.steps >= 2 * FEWEST_STEPS else 2

    @property
    def update(self) -> int:
        """The update at which faults are injected: the one after the second checkpoint."""
        return 2 * self.every + 1

    def train(self, run_dir: Path, settings: Sequence[str] = ()) -> list[str]:
        """Return the command line of a run, after the name of the program."""
        cache = [] if self.cache is None else [f"compilation_cache={quoted(str(self.cache))}"]
        return [
            "train",
            *self.words,
            *_CUT_DOWN,
            f"training.steps={self.steps}",
            f"checkpoint.every={self.every}",
            *cache,
            f"hydra.run.dir={quoted(str(run_dir))}",
            *settings,
        ]

    def layout(self, nprocs: int | None = None, devices: int | None = None) -> list[str]:
        """Return the flags of `launch` for the processes; by default those of the user."""
        devices = self.devices if nprocs is None else devices
        own = [] if devices is None else [f"--devices-per-process={devices}"]
        return [f"--nprocs={nprocs or self.nprocs}", *own]
