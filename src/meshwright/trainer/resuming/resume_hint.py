"""After a failure: which checkpoint a run can be resumed from, and how."""

from __future__ import annotations

import shlex
from pathlib import Path

from meshwright.checkpoint import FOLDER, CheckpointReader
from meshwright.errors import OutOfMemory, Spelling, current_spelling


def newest_checkpoint(run_dir: Path | None) -> int | None:
    """Return the update of a run's newest checkpoint; None if it has none."""
    if run_dir is None or not (run_dir / FOLDER).is_dir():
        return None
    return CheckpointReader(run_dir / FOLDER).latest()


def with_resuming(error: OutOfMemory, run_dir: Path | None) -> OutOfMemory:
    """Return an error that also says how to resume; the same one without a checkpoint."""
    update = newest_checkpoint(run_dir)
    if update is None:
        return error
    again = f"the same call with run_dir={str(run_dir)!r}"
    if current_spelling() is Spelling.COMMAND_LINE:
        again = f"the same command with {shlex.quote(f'hydra.run.dir={run_dir}')}"
    hint = f"update {update} is saved; to resume: {again} and one of these changes"
    return OutOfMemory(error.what, why=error.why, fix=f"{error.fix}\n{hint}")
