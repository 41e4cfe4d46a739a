"""The checkpointer: saves the state of a run at intervals, in the background."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.checkpoint import FOLDER
from meshwright.checkpoint.metadata import CheckpointMetadata
from meshwright.checkpoint.store import CheckpointStore, Saved, StateNotFinite
from meshwright.compiled.memory import MemoryUse
from meshwright.data.contents import DataFingerprint, data_fingerprint
from meshwright.errors import EnvironmentProblem
from meshwright.plan import Plan
from meshwright.processes import process_count
from meshwright.runtime.activity import MENTIONED_SECONDS
from meshwright.runtime.versions import package_versions
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState
from meshwright.text.units import counted
from meshwright.trainer.batch_loader import count_batches
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.run_progress import Progress

LogEvent = Callable[[str, int, str, dict[str, Any]], None]
"""Logs an event: its kind, its step, a message, and details."""


class Checkpointer:
    """Saves the states of a run; this one saves nothing."""

    def due(self, step: int) -> bool:
        """Whether to save the state after this step."""
        return False

    def save(self, state: TrainState, step: int, *, loss: float | None) -> bool:
        """Save the state; False if it was saved before, or if nothing is ever saved."""
        return False

    def poll(self) -> None:
        """Log the saves completed since the last call; a state that was not finite raises."""

    def settle(self) -> None:
        """Wait until every save is complete, and log it."""

    def finish(self) -> None:
        """Wait until every save is complete; raise if the last one failed."""

    def abandon(self) -> None:
        """Close after a failure; a save in progress is still completed."""


@dataclass
class BackgroundCheckpointer(Checkpointer):
    """Saves checkpoints in the background.

    A failed save is logged as a warning, and training continues until the next one; if the last
    save fails, the run fails. ``last_saved`` is the step of the newest checkpoint in the folder.
    """

    store: CheckpointStore
    form: CanonicalForm
    metadata: Callable[[int], CheckpointMetadata]
    every: int
    last_saved: int | None
    log_event: LogEvent
    _blocked: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    _not_finite: StateNotFinite | None = None
    _failed: Saved | None = None

    def due(self, step: int) -> bool:
        """Whether the step is a multiple of ``every``."""
        return step % self.every == 0

    def save(self, state: TrainState, step: int, *, loss: float | None) -> bool:
        """Copy the state and start writing it in the background.

        Waits for the save before it first, whose copy of the state makes room for this one.
        """
        self.poll()
        if step == self.last_saved:
            return False
        started = time.perf_counter()
        previous = self.store.wait()
        waited = time.perf_counter()
        snapshot = self.form.snapshot(state)
        self.store.save(snapshot.arrays, self.metadata(step), loss=loss, finite=snapshot.finite)
        blocked = time.perf_counter() - started
        self._blocked[step] = {"blocked_seconds": blocked, "waited_seconds": waited - started}
        self._log_outcome(previous)
        self._raise_failed()
        self._raise_not_finite()
        self.last_saved = step
        return True

    def poll(self) -> None:
        """Log the last save if it is complete."""
        self._log_outcome(self.store.finished())
        # The others need not fail as well: they end with this process.
        self._raise_failed()
        # Several processes finish a save at different times, but must raise at the same step.
        if process_count() == 1:
            self._raise_not_finite()

    def settle(self) -> None:
        """Wait for the save in progress."""
        self._log_outcome(self.store.wait())
        self._raise_failed()

    def finish(self) -> None:
        """Wait for the last save; if it failed, the run fails."""
        self._log_outcome(self.store.close())
        self._raise_failed()
        self._raise_not_finite()

    def abandon(self) -> None:
        """Wait for the save in progress, and log its outcome."""
        earlier, self._failed = self._failed, None
        self._log_outcome(self.store.close())
        if self._failed is not None and earlier is None:
            step, reason = self._failed.step, self._failed.reason
            self.log_event("warning", step, f"step {step} could not be saved: {reason}", {})

    def _raise_failed(self) -> None:
        """End the run, which would otherwise continue without a checkpoint to return to."""
        if self._failed is not None:
            raise EnvironmentProblem(
                f"the state after {counted(self._failed.step, 'step')} could not be saved",
                why=self._failed.reason,
                fix=f"{self._failed.fix or 'free disk space'}, and resume from the previous "
                "checkpoint",
            )

    def _raise_not_finite(self) -> None:
        if self._not_finite is not None:
            raise self._not_finite

    def _log_outcome(self, saved: Saved | None) -> None:
        if saved is None:
            return
        if isinstance(saved.error, StateNotFinite):
            self._not_finite = self._not_finite or saved.error
        elif saved.error is None:
            blocked = self._blocked.pop(saved.step)
            text = (
                f"saved step {saved.step} in {saved.seconds:.2f} s, blocked training for "
                f"{blocked['blocked_seconds']:.3f} s"
            )
            if blocked["waited_seconds"] >= MENTIONED_SECONDS:
                text += f", {blocked['waited_seconds']:.3f} s of it for the save before it"
            self.log_event("checkpoint", saved.step, text, {"seconds": saved.seconds, **blocked})
        else:
            self._failed = saved


class RunMetadata:
    """The `CheckpointMetadata` of a run's checkpoints, which differ in the step only."""

    def __init__(
        self,
        asked: FitSettings,
        seed: int,
        plan: Plan,
        progress: Progress,
        training: Mapping[str, Any],
        run: str = "",
    ) -> None:
        assert asked.data is not None
        self._data, self._progress, self.training, self.run = asked.data, progress, training, run
        self.dataset = data_fingerprint(asked.data, seed).text
        self._fixed = CheckpointMetadata(
            step=0,
            seed=seed,
            dataset=self.dataset,
            num_samples=asked.data.num_samples,
            global_batch_size=plan.batch.global_batch_size,
            plan=plan.model_dump(mode="json"),
            config=asked.config,
            versions=package_versions(),
            processes=process_count(),
            training=training,
            run=run,
        )

    def data_like(self, saved: CheckpointMetadata) -> DataFingerprint:
        """Return the fingerprint of the run's data, made as that of a checkpoint was."""
        return data_fingerprint(self._data, saved.seed)

    def at(self, step: int) -> CheckpointMetadata:
        """Return the metadata of a checkpoint after a step."""
        data, progress = self._data, self._progress
        number = step + count_batches(progress.left_out)
        return replace(
            self._fixed,
            step=step,
            data_position=data.position(number),
            skipped=progress.skipped,
            left_out=tuple(map(tuple, progress.left_out)),
        )


def make_checkpointer(
    asked: FitSettings,
    form: CanonicalForm,
    metadata: RunMetadata,
    *,
    last_saved: int | None,
    log_event: LogEvent,
    step_memory: MemoryUse | None = None,
) -> Checkpointer:
    """Return what saves the states of a run; see `BackgroundCheckpointer`."""
    config = asked.checkpoint
    if asked.run_dir is None or not config.enabled:
        return Checkpointer()
    store = CheckpointStore(
        asked.run_dir / FOLDER, keep_last=config.keep_last, keep_best=config.keep_best
    )
    form.prepare(None if step_memory is None else step_memory.total - step_memory.argument)
    return BackgroundCheckpointer(
        store, form, metadata.at, every=config.every, last_saved=last_saved, log_event=log_event
    )
