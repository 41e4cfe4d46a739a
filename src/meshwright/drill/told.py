"""What a drill tells the processes of a training, and what they note for it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DRILL = "MESHWRIGHT_DRILL"
"""The environment variable with what a process is told, as JSON; only `worker` reads it."""


@dataclass(frozen=True)
class Told:
    """What a process of a drilled training is told.

    Attributes:
        fault: the fault to inject; empty for none.
        notes: the folder for notes.
        run_dir: the run folder.
        update: the update at which the fault happens.
        every: updates between two checkpoints.
        save_seconds: how long a save took without a fault.
        limit_bytes: how large files may become on a disk that is full.
    """

    fault: str
    notes: str
    run_dir: str
    update: int
    every: int
    save_seconds: float = 0.0
    limit_bytes: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Told:
        """Return what the drill says."""
        return cls(**json.loads((os.environ if environ is None else environ)[DRILL]))

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable for the launcher."""
        return {DRILL: json.dumps(asdict(self))}

    def note(self, kind: str, **values: Any) -> None:
        """Write a note for the drill; it is complete once it can be read."""
        path = Path(self.notes) / f"{kind}-{os.getpid()}.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(values), encoding="utf-8")
        draft.replace(path)


def read_notes(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the notes of one kind that processes have written."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob(f"{kind}-*.json"))]
