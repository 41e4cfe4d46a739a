"""What the initial model computes once for every sample, at the start of a run."""

from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.initial_fields import InitialFields, Table, task_of
from meshwright.errors import EnvironmentProblem, UserError
from meshwright.processes import agree, attempt_on_main
from meshwright.program.trace.traced_loss import Loss
from meshwright.runtime.activity import activity
from meshwright.step.state import TrainState
from meshwright.text.units import counted
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.evaluating.evaluation import predict
from meshwright.trainer.programs import Programs
from meshwright.trainer.run_dir import write_arrays
from meshwright.trainer.starting.restoring import Restoring

FOLDER = "initial_fields"
"""The folder in a run's folder that keeps the tables."""


def fill_tables(
    programs: Programs, state: TrainState, loss: Loss, restoring: Restoring, tracker: Tracker
) -> None:
    """Fill the tables of the data: computed now, or if training has begun, from where it began."""
    point, asked = restoring.point, restoring.asked
    for data in (asked.data, asked.eval_data):
        if not isinstance(data, InitialFields):
            continue
        name = f"{fingerprint_of(data.fingerprint(), *data.names)}.npz"
        folders = [asked.run_dir, None if point is None else point.folder.parent]
        files = [folder / FOLDER / name for folder in folders if folder is not None]
        begun = point is not None or restoring.steps_before > 0
        if begun:
            _read_table(data, files)
        else:
            named = f"{' and '.join(data.names)} of {counted(len(data.source), 'sample')}"
            with activity(f"computing {named}"):
                data.table.update(predict(programs, state, data, task_of(loss).initial_fields))
            tracker.event("note", 0, f"the initial model computed {named}", {})
        if asked.run_dir is not None:
            problem = attempt_on_main(partial(_write, files[0], data.table, keep=begun))
            if problem:
                raise EnvironmentProblem(f"{files[0]} cannot be written", why=problem)


def _read_table(data: InitialFields, files: list[Path]) -> None:
    """Read the table of a run that has begun, unless this process has it already."""
    for file in files:
        if not data.table:
            data.table.update(_saved(file))
    if not agree(data.table.keys() == set(data.names), "all"):
        raise UserError(
            f"{' and '.join(data.names)} of {data.describe()} are not known",
            why="the initial model computes them, and training has changed it"
            + (f"; {files[-1]} cannot be read" if files else ""),
            fix="go on with the data that the run began with, or start another run",
        )


def _saved(file: Path) -> Table:
    """Return what a file has, which is nothing if it is missing or damaged."""
    try:
        with np.load(file, allow_pickle=False) as saved:
            return {name: saved[name] for name in saved}
    except (OSError, ValueError, BadZipFile):
        return {}


def _write(file: Path, table: Table, *, keep: bool) -> None:
    """Write a table, unless there is one to keep."""
    if keep and _saved(file):
        return
    write_arrays(file, table)
