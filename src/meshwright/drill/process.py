"""A process of a drilled run: its instructions, and the notes that it writes for the drill."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.launch.restarts import CHECKPOINTS, newest_checkpoint
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.runtime.hooks import add_batch_hook, add_log_hook
from meshwright.text.json_text import write_atomically

DRILL = "MESHWRIGHT_DRILL"
"""The environment variable with the instructions, as JSON; only `worker` reads it."""
COMMIT_SECONDS = 120.0
"""How long to wait for the checkpoint before a fault; without it the drill would show little."""
INJECTED, LAUNCHED, BATCH = "injected", "process", "batch"
"""Kinds of notes: a fault was injected, a process has started, and the dtypes of a batch."""


@dataclass(frozen=True)
class Instructions:
    """What a drill instructs a process to do; an empty fault is none.

    A save took ``save_seconds`` without a fault; on a disk that is full, files may have
    ``limit_bytes``.
    """

    fault: str
    notes: str
    run_dir: str
    step: int
    every: int
    save_seconds: float = 0.0
    limit_bytes: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Instructions:
        """Return the instructions for this process."""
        return cls(**json.loads((os.environ if environ is None else environ)[DRILL]))

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable for the launcher."""
        return {DRILL: json.dumps(asdict(self))}

    def note(self, kind: str, **values: Any) -> None:
        """Write a note for the drill; it is complete once it can be read."""
        write_atomically(Path(self.notes) / f"{kind}-{os.getpid()}.json", json.dumps(values))


def read_notes(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the notes of one kind that processes have written."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob(f"{kind}-*.json"))]


@dataclass(frozen=True)
class DrilledProcess:
    """A process of a drilled run before it trains; attempts count from 0."""

    instructions: Instructions
    rank: int
    nprocs: int
    attempt: int

    @classmethod
    def this(cls) -> DrilledProcess:
        """Return this process, by its environment."""
        rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
        attempt = EarlierAttempts.from_environment().count
        return cls(Instructions.from_environment(), rank, size, attempt)

    @property
    def is_last(self) -> bool:
        """Whether it is the last process: the only one, or one that does not coordinate."""
        return self.rank == self.nprocs - 1

    def at_step(self, action: Callable[[], object]) -> None:
        """Do something when the metrics of the step are known, while the next one runs.

        The last checkpoint before it is complete by then.
        """

        def act(step: int) -> None:
            if step == self.instructions.step:
                self._wait_for_commit()
                self.note_injected()
                action()

        add_log_hook(act)

    def during_save(self, step: int, delay: float, action: Callable[[], object]) -> None:
        """Do something some seconds after the checkpoint of a step has begun to be written."""

        def watch() -> None:
            while not any(path.name.split(".")[0] == str(step) for path in self._written()):
                time.sleep(0.001)
            time.sleep(delay)
            self.note_injected()
            action()

        threading.Thread(target=watch, daemon=True).start()

    def change_batch(self, change: Callable[[Any], Any]) -> None:
        """Change the batch of the step, before it is placed on the devices."""

        def change_one(number: int, batch: Any) -> Any:
            if number != self.instructions.step - 1:
                return batch
            self.note_injected()
            return change(batch)

        add_batch_hook(change_one)

    def note_batch(self) -> None:
        """Note the dtypes of a batch."""

        def note(number: int, batch: Any) -> Any:
            if number == 0:
                import jax

                dtypes = [str(leaf.dtype) for leaf in jax.tree.leaves(batch)]
                self.instructions.note(BATCH, dtypes=dtypes)
            return batch

        add_batch_hook(note)

    def note_process(self) -> None:
        """Note this process, so that the drill can check that it ends."""
        port = os.environ.get("MASTER_PORT", "0")
        self.instructions.note(LAUNCHED, rank=self.rank, group=os.getpgid(0), port=int(port))

    def note_injected(self) -> None:
        """Note that the fault is injected now, and which checkpoints must survive it."""
        committed = [int(path.name) for path in self._written() if path.name.isdecimal()]
        self.instructions.note(INJECTED, rank=self.rank, time=time.time(), committed=committed)

    def _written(self) -> list[Path]:
        folder = Path(self.instructions.run_dir) / CHECKPOINTS
        return list(folder.iterdir()) if folder.is_dir() else []

    def _wait_for_commit(self) -> None:
        given = self.instructions
        due = (given.step - 1) // given.every * given.every
        ends = time.monotonic() + COMMIT_SECONDS
        while (newest_checkpoint(Path(given.run_dir)) or 0) < due and time.monotonic() < ends:
            time.sleep(0.01)
