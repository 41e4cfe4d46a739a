"""Restoring the state of a run: from the checkpoint it resumes from, or to go back to."""

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint import FOLDER, CheckpointMetadata, CheckpointReader
from meshwright.checkpoint.damage import DamagedCheckpoint
from meshwright.errors import OutOfMemory, Spelling, current_spelling
from meshwright.program.trace.choose_adapters import describe_adapters
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.batch_loader import count_batches
from meshwright.trainer.callbacks import Callbacks
from meshwright.trainer.checkpointer import RunMetadata
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.run_progress import Progress
from meshwright.trainer.starting.resume import (
    check_fits,
    check_same_run,
    check_same_scale,
    earlier_evaluations,
    find_resume_point,
    restore,
    set_damaged_aside,
)
from meshwright.trainer.starting.run_warnings import other_microbatches
from meshwright.trainer.starting.same_training import (
    check_same_average,
    loss_changes,
    not_compared,
    training_changes,
)
from meshwright.trainer.starting.start import Start


@dataclass
class Restoring:
    """Restores the states of a run; a damaged checkpoint is replaced by an earlier one.

    ``point`` is the checkpoint that the run resumes from, if any.
    """

    start: Start
    asked: FitSettings
    assembled: Assembled
    form: CanonicalForm
    metadata: RunMetadata
    _compared: str = ""
    _prepared: TrainState | None = None

    def __post_init__(self) -> None:
        self.point = self.start.point

    @property
    def steps_before(self) -> int:
        """Steps done before this run."""
        return self.start.steps if self.point is None else self.point.step

    def check(self) -> list[str]:
        """Refuse a checkpoint of another run or model; return accepted changes as warnings."""
        point, plan = self.point, self.assembled.plan
        if point is None:
            return []
        before, now, config = point.metadata.training, self.metadata.training, self.asked.config
        check_same_average(before, now, point.path)
        check_fits(point, self.form)
        check_same_scale(point, self.assembled.model_leaves.adapters.values())
        data = self.metadata.data_like(point.metadata)
        self._compared = data.compared if point.metadata.dataset == data.text else ""
        from_python = not config and not point.metadata.config
        changes = check_same_run(
            point.metadata,
            config,
            data=data,
            num_samples=None if self.asked.data is None else self.asked.data.num_samples,
            global_batch_size=plan.batch.global_batch_size,
            accept=self.asked.checkpoint.accept_changes,
            others=training_changes(before, now) if from_python and before else (),
        )
        # A config says what changed in it, but not in the code that it names.
        known = not_compared(before, now) if from_python else loss_changes(before, now)
        leaves = self.assembled.traced.layout.leaves
        return [*changes, *known, *other_microbatches(point.metadata, plan.batch, leaves)]

    def set_damaged_aside(self) -> list[str]:
        """Rename the damaged checkpoints that were found with the resume point."""
        if self.point is None or not self.point.same_run:
            return []
        folder = self.point.folder
        return [set_damaged_aside(folder, damage) for damage in self.point.damaged]

    def prepare(self) -> None:
        """Make the state of a new run ahead; what fails is tried again when it is needed."""
        if self.point is None and not self.start.steps:
            with suppress(Exception):
                self._prepared = self.start.state()

    def first_state(self, tracker: Tracker, progress: Progress, callbacks: Callbacks) -> TrainState:
        """Return the state to start from, restored if there is a checkpoint to resume from."""
        start = self.start
        if adapted := describe_adapters(self.assembled.model_leaves):
            tracker.event("note", 0, adapted, {})
        if self.point is None:
            done = progress.step = start.steps
            if done:
                tracker.event("resume", done, f"continuing after step {done}", {})
            elif start.source:
                tracker.event("weights", 0, start.source, {})
            prepared, self._prepared = self._prepared, None
            with activity("initializing the state"):
                return prepared or start.state()
        with activity(f"restoring step {self.point.step}"):
            state = self._restore(tracker)
        point = self.point
        progress.step, progress.skipped = point.step, point.metadata.skipped
        progress.left_out[:] = map(list, point.metadata.left_out)
        data, position = self.asked.data, point.metadata.data_position
        if data is not None and position is not None:
            # Data that is read in order goes on where it was.
            data.go_to(point.step + count_batches(point.metadata.left_out), position)
        message = f"continuing after step {point.step}, from {point.path}"
        if self._compared:
            message += f"; the data are the same (compared: {self._compared})"
        tracker.event("resume", point.step, message, {"checkpoint": str(point.path)})
        for step, values in earlier_evaluations(point, self.asked.run_dir):
            callbacks.call("on_recall", step, values)
        return state

    def rewind(self, tracker: Tracker) -> tuple[CheckpointMetadata, TrainState]:
        """Restore the newest sound checkpoint of the run."""
        started_from = self.point
        self.point = find_resume_point("must", self.asked.run_dir)
        state = self._restore(tracker)
        assert self.point is not None
        metadata, self.point = self.point.metadata, started_from
        return metadata, state

    def _restore(self, tracker: Tracker) -> TrainState:
        """Restore the newest sound checkpoint; one that was asked for by name must be sound."""
        while True:
            assert self.point is not None
            try:
                return restore(self.point, self.form, self.start.weights)
            except DamagedCheckpoint as error:
                if not self.point.same_run:
                    raise
                warning = set_damaged_aside(self.point.folder, error.damage)
                tracker.event("warning", 0, warning, {})
            self.point = find_resume_point("must", self.asked.run_dir)
            for warning in [*self.check(), *self.set_damaged_aside()]:
                tracker.event("warning", 0, warning, {})


def newest_checkpoint(run_dir: Path | None) -> int | None:
    """Return the step of a run's newest checkpoint; None if it has none."""
    return None if run_dir is None else CheckpointReader(run_dir / FOLDER).latest()


def with_resuming(error: OutOfMemory, run_dir: Path | None) -> OutOfMemory:
    """Return an error that also says how to resume; the same one without a checkpoint."""
    step = newest_checkpoint(run_dir)
    if step is None:
        return error
    again = f"the same call with run_dir={str(run_dir)!r}"
    if current_spelling() is Spelling.COMMAND_LINE:
        again = f"the same command with {shlex.quote(f'hydra.run.dir={run_dir}')}"
    hint = f"step {step} is saved; to resume: {again} and one of these changes"
    return OutOfMemory(error.what, why=error.why, fix=f"{error.fix}\n{hint}")
