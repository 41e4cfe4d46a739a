"""What a run does about a step that was not finite: it stops, skips it, or goes back."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint.metadata import CheckpointMetadata
from meshwright.checkpoint.store import StateNotFinite
from meshwright.data.protocols import Data
from meshwright.errors import ANY, Setting, Spelling, current_spelling
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState
from meshwright.text.units import counted
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.batch_loader import BatchFeed, count_batches
from meshwright.trainer.checkpointer import Checkpointer
from meshwright.trainer.incidents.flight_record import FlightRecorder, Incident
from meshwright.trainer.incidents.not_finite import (
    BadStep,
    FiniteCheck,
    bad_step_error,
    parameters_fail,
    smaller_steps,
)
from meshwright.trainer.limits import Limits
from meshwright.trainer.run_progress import Progress
from meshwright.trainer.trainer_settings import TrainerSettings

SHOWN_SAMPLES = 8
Rewind = Callable[[], tuple[CheckpointMetadata, TrainState]]
"""Restores the newest checkpoint of the run."""


@dataclass(kw_only=True)
class Recovery:
    """Deals with bad steps as the trainer says, identically in every process.

    Before the run stops, the last good state is saved; ``rewind`` restores the newest checkpoint.
    """

    trainer: TrainerSettings
    feed: BatchFeed
    form: CanonicalForm
    recorder: FlightRecorder
    checkpointer: Checkpointer
    rewind: Rewind
    limits: Limits
    tracker: Tracker
    data: Data
    batch_size: int
    _skipped: list[int] = field(default_factory=list[int])
    _record: Path | None = None

    def __post_init__(self) -> None:
        self._rewinds = len(self.feed.left_out)

    @property
    def rewinds(self) -> bool:
        """Whether a checkpoint must be there from the beginning."""
        return self.trainer.on_nonfinite == "rewind"

    def handle(
        self, bad: BadStep, state: TrainState, check: FiniteCheck, progress: Progress
    ) -> TrainState:
        """Return the state to continue from, and set the progress; raise if the run stops here.

        Neither the bad step nor those after it have changed anything.
        """
        check.forget()
        # Two saves at once would wait for each other's processes.
        self.checkpointer.settle()
        step = bad.values.step
        progress.step = step - 1
        number, batch = self.feed.number(step), self.feed.back_to(step)
        ids = self.data.ids(number, self.batch_size)
        samples = None if ids is None else [int(each) for each in ids]
        snapshot = self.form.snapshot(state)
        good = bool(np.asarray(snapshot.finite))
        limit = self._limit(step, good=good)
        action = "stop" if limit else self.trainer.on_nonfinite
        incident = Incident(bad, number, samples, batch, list(check.history), action)
        record, remark = self.recorder.write(incident, snapshot)
        # Only the first few are recorded; one of them shows what the later ones are like.
        self._record = record or self._record
        where = f"batch {number}{_shown(samples)}"
        # Later, an index below zero is one that the loss has always masked.
        numbers, indices = self.recorder.wrong_values(batch, negative=step == 1)
        kept = f"record: {record}" if record else remark
        if action == "stop":
            self._log(incident, f"{where}; {kept}", record)
            if good and progress.step:
                # The state before it was not finite either, if an earlier save found one so.
                with suppress(StateNotFinite):
                    self.checkpointer.save(state, progress.step, loss=None)
            raise bad_step_error(
                bad.values,
                batch=where,
                limit="" if self.trainer.on_nonfinite == "stop" and good else limit,
                fix=_next_steps(self._record, self.trainer.on_nonfinite),
                indices=indices,
                numbers=numbers,
            ) from None
        if action == "skip":
            done = self._skip(step, progress)
            state = replace(state, halted=cleared(state.halted))
        else:
            state, done = self._go_back(number, progress)
        told = "; ".join(filter(None, (where, indices, numbers, done, kept)))
        self._log(incident, told, record)
        return state

    def _limit(self, step: int, *, good: bool) -> str:
        """Return why the run stops; empty if it continues."""
        trainer = self.trainer
        if trainer.on_nonfinite == "rewind":
            most = trainer.max_rewinds
            return f"the run went back {counted(most, 'time')}" * (self._rewinds >= most)
        if not good:
            # No step of such a state is finite.
            return "the state was not finite before it"
        if trainer.on_nonfinite == "skip":
            most = trainer.max_skipped
            before = list(range(step - most, step))
            return f"the {counted(most, 'step')} before it were skipped" * (
                self._skipped[-most:] == before
            )
        return str(Setting("training.on_nonfinite", "stop"))

    def _skip(self, step: int, progress: Progress) -> str:
        self._skipped.append(step)
        progress.step, progress.skipped = step, progress.skipped + 1
        return f"the step was skipped, {counted(progress.skipped, 'step')} so far"

    def _go_back(self, number: int, progress: Progress) -> tuple[TrainState, str]:
        """Restore the newest checkpoint, and leave out the batches since."""
        metadata, state = self.rewind()
        before, self._rewinds = count_batches(progress.left_out), self._rewinds + 1
        first = metadata.step + count_batches(metadata.left_out)
        progress.go_back(metadata.step, metadata.skipped)
        self.feed.leave_out(metadata.left_out, first, number)
        if self.limits.whole_data and self.limits.steps is not None:
            # An epoch has fewer batches now.
            self.limits.steps -= count_batches(progress.left_out) - before
        left = f"batch {first}" if first == number else f"batches {first} to {number}"
        left += " are" if first < number else " is"
        return state, f"back to the checkpoint of step {metadata.step}, {left} left out"

    def _log(self, incident: Incident, text: str, record: Path | None) -> None:
        values = incident.bad.values
        self.tracker.event(
            "incident",
            values.step,
            f"{values}: {text}",
            {
                "action": incident.action,
                "loss": str(values.loss),
                "grad_norm": str(values.grad_norm),
                "batch": incident.number,
                "samples": incident.samples,
                "record": None if record is None else str(record),
            },
        )


def cleared(halted: Any) -> Any:
    """Return a cleared flag in place of one that says that a step was not finite."""
    return jax.make_array_from_callback((), halted.sharding, lambda _: np.zeros((), bool))


def _shown(samples: Sequence[int] | None) -> str:
    if samples is None:
        return ""
    more = ", …" if len(samples) > SHOWN_SAMPLES else ""
    return f" (samples {', '.join(map(str, samples[:SHOWN_SAMPLES]))}{more})"


def _next_steps(record: Path | None, on_nonfinite: str) -> str:
    if record is None and on_nonfinite == "stop":
        first = f"continue without the batch: {Setting('training.on_nonfinite', 'skip')}; or "
        return first + smaller_steps()
    steps: list[str] = []
    if record is not None:
        python = current_spelling() is Spelling.PYTHON
        call = f'mw.replay("{record}", model={ANY}, loss={ANY})'
        command = call if python else f"meshwright replay {shlex.quote(str(record))}"
        steps.append(f"{command} finds the module and the samples")
    if on_nonfinite == "stop":
        steps.append(
            f"if only some samples fail, {Setting('training.on_nonfinite', 'skip')} continues "
            f"without the batch; if all do, {parameters_fail()}"
        )
        return "; ".join(steps)
    return "; ".join([*steps, smaller_steps()])
