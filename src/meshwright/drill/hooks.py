"""Where faults are put into a process that trains: at an update, or into the batches it reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.drill.told import Told
from meshwright.launch.restarts import CHECKPOINTS, newest_checkpoint
from meshwright.runtime.attempts import EarlierAttempts

COMMIT_SECONDS = 120.0
"""How long to wait for the checkpoint before a fault; without it the drill would show little."""
INJECTED, LAUNCHED, BATCH = "injected", "process", "batch"
"""Kinds of notes: a fault has happened, a process has started, and what batches are like."""


@dataclass(frozen=True)
class Hooks:
    """A process of a drilled training, before it starts to train.

    Attributes:
        told: what the drill says.
        rank: the number of the process.
        nprocs: the number of processes.
        attempt: how often the launcher has started it before.
    """

    told: Told
    rank: int
    nprocs: int
    attempt: int

    @classmethod
    def of_this_process(cls) -> Hooks:
        """Return the hooks of this process, by its environment."""
        rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
        return cls(Told.from_environment(), rank, size, EarlierAttempts.from_environment().count)

    @property
    def is_last(self) -> bool:
        """Whether it is the last process: the only one, or one that does not coordinate."""
        return self.rank == self.nprocs - 1

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return Path(self.told.run_dir) / CHECKPOINTS

    def at_update(self, action: Callable[[], object]) -> None:
        """Do something when the metrics of the update are there, while the next one runs.

        The last checkpoint before it is complete by then.
        """
        from meshwright.trainer.callbacks import Callbacks

        target: Any = Callbacks
        on_log = target.on_log

        def with_fault(callbacks: Callbacks, update: int, values: Any) -> None:
            if update == self.told.update:
                self._wait_for_commit()
                self.note_injected()
                action()
            on_log(callbacks, update, values)

        target.on_log = with_fault

    def during_save(self, update: int, delay: float, action: Callable[[], object]) -> None:
        """Do something some seconds after the checkpoint of an update has begun to be written."""

        def watch() -> None:
            while not any(path.name.split(".")[0] == str(update) for path in self._written()):
                time.sleep(0.001)
            time.sleep(delay)
            self.note_injected()
            action()

        threading.Thread(target=watch, daemon=True).start()

    def change_batch(self, change: Callable[[Any], Any]) -> None:
        """Change the batch of the update, before it is placed on the devices."""

        def change_one(number: int, batch: Any) -> Any:
            if number != self.told.update:
                return batch
            self.note_injected()
            return change(batch)

        _pass_batches(change_one)

    def note_batch(self) -> None:
        """Note of which kinds of numbers batches are."""

        def note(number: int, batch: Any) -> Any:
            if number == 1:
                import jax

                self.told.note(BATCH, kinds=[str(leaf.dtype) for leaf in jax.tree.leaves(batch)])
            return batch

        _pass_batches(note)

    def note_process(self) -> None:
        """Note this process for the drill, which looks whether it ends."""
        port = os.environ.get("MASTER_PORT", "0")
        self.told.note(LAUNCHED, rank=self.rank, group=os.getpgid(0), port=int(port))

    def note_injected(self) -> None:
        """Note that the fault happens now, and which checkpoints must survive it."""
        committed = [int(path.name) for path in self._written() if path.name.isdecimal()]
        self.told.note(INJECTED, rank=self.rank, time=time.time(), committed=committed)

    def _written(self) -> list[Path]:
        return list(self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []

    def _wait_for_commit(self) -> None:
        due = (self.told.update - 1) // self.told.every * self.told.every
        ends = time.monotonic() + COMMIT_SECONDS
        while (newest_checkpoint(Path(self.told.run_dir)) or 0) < due and time.monotonic() < ends:
            time.sleep(0.01)


def _pass_batches(function: Callable[[int, Any], Any]) -> None:
    """Pass every batch, numbered from 1, through a function before it is placed on the devices."""
    from meshwright.trainer import batch_loader

    place_batch, number = batch_loader.place_batch, 0

    def place(batch: Any, *rest: Any) -> Any:
        nonlocal number
        number += 1
        return place_batch(function(number, batch), *rest)

    batch_loader.place_batch = place
