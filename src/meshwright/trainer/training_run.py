"""A training run: checks its spec, compiles the step, restores or creates a state, and trains."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.checkpoint import FOLDER, CheckpointMetadata, CheckpointReader, CheckpointStore
from meshwright.checkpoint.damage import DamagedCheckpoint
from meshwright.data.token_cache import take_origins
from meshwright.errors import ANY, NotFinite, OutOfMemory, Setting, UserError, first_line
from meshwright.planner.fit.fit_check import check_memory, warn_of_compiled
from meshwright.planner.fit.out_of_memory import KnownProgram, MemoryAdvice
from meshwright.processes import barrier, is_main, process_count
from meshwright.processes.handshake import Facts, compare_processes, describe_own_devices
from meshwright.profile import NoProfiling, Profile, Profiling
from meshwright.runtime.activity import activity
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.runtime.code_digests import own_code, users_code
from meshwright.runtime.heartbeat import Doing, own_heartbeat
from meshwright.runtime.interrupt import Interrupt, Phase
from meshwright.runtime.versions import package_versions
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState
from meshwright.tracking.setup import check_tracking, make_trackers
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.batch_feed import BatchFeed, count_batches
from meshwright.trainer.batch_loader import BatchLoader
from meshwright.trainer.callback_context import CallbackContext
from meshwright.trainer.callbacks import Callback, Callbacks, EarlyStopping
from meshwright.trainer.checkpointer import BackgroundCheckpointer, Checkpointer, NullCheckpointer
from meshwright.trainer.compiled_step import (
    WARN_FROM_BYTES,
    CompiledStep,
    compile_step,
    refuse_deviations,
)
from meshwright.trainer.ending.limits import Limits
from meshwright.trainer.evaluating.evaluation import Evaluator
from meshwright.trainer.incidents.flight_record import FlightRecorder
from meshwright.trainer.incidents.recovery import Recovery
from meshwright.trainer.loop import Loop
from meshwright.trainer.meter import Meter, Work
from meshwright.trainer.programs import Programs
from meshwright.trainer.resuming.fewer_processes import fewer_processes_note
from meshwright.trainer.resuming.resume import (
    ResumePoint,
    check_fits,
    check_newest,
    check_same_run,
    earlier_evaluations,
    find_resume_point,
    restore,
    set_damaged_aside,
)
from meshwright.trainer.resuming.resume_hint import newest_checkpoint, with_resuming
from meshwright.trainer.run_progress import Progress
from meshwright.trainer.run_spec import EvaluationSpec, RunSpec
from meshwright.trainer.starting.disk_space import check_disk_space
from meshwright.trainer.starting.folder import make_run_folder, write_files
from meshwright.trainer.starting.optax_rate import injected_rate
from meshwright.trainer.starting.run_facts import describe_run, work_per_update
from meshwright.trainer.starting.run_lock import RunLock
from meshwright.trainer.starting.start_warnings import other_microbatches, repeated_samples
from meshwright.trainer.trained.fit_result import FitResult, summarize
from meshwright.weights.kept import HF_FOLDER


class TrainingRun:
    """A training run that has passed all checks that need no compilation.

    The constructor checks the spec; nothing is written or compiled before `run`.

    Args:
        spec: what to train, and how.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._plan, self._run_dir = spec.assembled.plan, spec.output.run_dir
        if process_count() > 1:
            compare_processes(_facts(spec))
        self._context = CallbackContext(spec.assembled)
        self._callbacks = Callbacks(spec.callbacks)
        evaluated = spec.evaluation.loss or spec.loss
        self._programs = spec.programs or Programs(spec.assembled, evaluated)
        self._callbacks.attach(self._context)
        _check_early_stopping(spec.callbacks, spec.evaluation)
        check_tracking(spec.output.tracking, self._run_dir)
        self._updates = self._count_updates()
        self._evaluator = self._make_evaluator()
        self._metadata = self._make_metadata()
        self._point, self._progress = spec.resume_point, Progress()
        self._check_rewinding()
        self._warnings = [*spec.warnings, *self._check_resume_point(), *self._check_samples()]
        self._warnings += check_memory(spec.assembled, spec.estimator)

    def run(self) -> FitResult:
        """Train in the run folder, which no other run can use meanwhile."""
        heartbeat = own_heartbeat()
        heartbeat.begin()
        try:
            return self._run() if self._run_dir is None else self._run_in_folder(self._run_dir)
        finally:
            heartbeat.mark(Doing.ENDED)

    def _run_in_folder(self, run_dir: Path) -> FitResult:
        own_heartbeat().tell_folder(run_dir.absolute())
        make_run_folder(run_dir)
        lock = RunLock(run_dir)
        lock.acquire()
        try:
            check_newest(self._point, run_dir)
            self._check_disk_space(run_dir)
            write_files(run_dir, self._spec.output.files)
            write_files(run_dir / HF_FOLDER, self._spec.output.hf_files)
            self._set_damaged_aside()
            return self._run()
        finally:
            lock.release()

    def _check_disk_space(self, run_dir: Path) -> None:
        config = self._spec.output.checkpoint
        if config.enabled:
            present = CheckpointReader(run_dir / FOLDER).updates()
            most = config.keep_last + config.keep_best + 1
            warning = check_disk_space(run_dir, self._form.structs, most=most, present=len(present))
            self._warnings += [warning] if warning else []

    def _run(self) -> FitResult:
        """Train; after a failure the checkpointer and the trackers are closed as well."""
        started = time.perf_counter()
        spec, output = self._spec, self._spec.output
        with self._advice.during(lambda: "compiling the step"):
            compiled = self._compiled_step()
        known = KnownProgram(compiled.memory, compiled.text)
        self._warnings += warn_of_compiled(spec.assembled, compiled.memory)
        if spec.strict:
            refuse_deviations([*spec.assembled.remarks, *compiled.deviations()])
        tracker = make_trackers(
            output.tracking, self._run_dir, total_updates=self._updates, progress=output.progress
        )
        progress, interrupt = self._progress, spec.interrupt or Interrupt()
        # A signal ends a process at once until here; from here on all processes stop together.
        barrier("compiled")
        interrupt.phase = Phase.TRAINING
        checkpointer: Checkpointer = NullCheckpointer()
        summary: dict[str, Any] = {}
        try:
            self._log_start(tracker, compiled)
            with self._advice.during(lambda: "placing the state", known):
                state = self._first_state(tracker, progress)
                checkpointer = self._make_checkpointer(tracker)
            loop = self._make_loop(compiled, tracker, checkpointer, interrupt)
            with (
                interrupt.watch(),
                loop.limits.watching(),
                self._advice.during(
                    lambda: f"training, near update {max(progress.update, 1)}", known
                ),
            ):
                state = loop.train(state, progress)
            interrupt.phase = Phase.ENDED
            result = self._finish(tracker, state, progress, time.perf_counter() - started)
            summary = result.summary()
        except BaseException as error:
            checkpointer.abandon()
            reason = first_line(error)
            tracker.event("stop", progress.update, f"failed: {reason}", {"failed": True})
            if isinstance(error, OutOfMemory):
                raise with_resuming(error, self._run_dir) from error.__cause__
            if isinstance(error, NotFinite):
                summary = self._failed_summary(progress, reason, time.perf_counter() - started)
            raise
        finally:
            tracker.close(summary)
        return result

    def _failed_summary(self, progress: Progress, reason: str, seconds: float) -> dict[str, Any]:
        """Return the content of result.json for a run that another attempt would not save."""
        earlier = EarlierAttempts.from_environment()
        return {
            **summarize(progress.losses, progress.eval),
            "updates": progress.update,
            "skipped": progress.skipped - self._skipped_before,
            "seconds": seconds,
            "goodput": earlier.goodput(own_heartbeat().useful, seconds),
            "attempts": earlier.count + 1,
            "stopped": f"failed: {reason}",
            "failed": True,
        }

    def _compiled_step(self) -> CompiledStep:
        spec = self._spec
        return self._programs.step(spec.batch, lambda: compile_step(spec.assembled, spec.batch))

    def _check_resume_point(self) -> list[str]:
        """Refuse a checkpoint of another run or model; return accepted changes as warnings."""
        spec, point = self._spec, self._point
        if point is None:
            return []
        changes = check_same_run(
            point.metadata,
            spec.config,
            dataset=self._metadata.dataset,
            global_batch_size=self._plan.batch.global_batch_size,
            accept=spec.output.checkpoint.accept_changes,
        )
        check_fits(point, self._form)
        leaves = spec.assembled.traced.layout.leaves
        return [*changes, *other_microbatches(point.metadata, self._plan.batch, leaves)]

    def _count_updates(self) -> int | None:
        """Return how many updates to do; None if a time or the end of the data decides."""
        spec = self._spec
        if spec.duration.epochs is not None and spec.data.stop_after(spec.duration.epochs):
            return None
        return spec.duration.total_updates(
            num_samples=spec.data.num_samples, batch_size=self._plan.batch.global_batch_size
        )

    def _check_samples(self) -> list[str]:
        data, saves = self._spec.data, self._run_dir is not None or self._point is not None
        order = data.order if saves else ""
        repeated = repeated_samples(self._plan.batch.global_batch_size, data.num_samples)
        return [*repeated, *([order] if order else [])]

    def _log_start(self, tracker: Tracker, compiled: CompiledStep) -> None:
        spec = self._spec
        deviations = compiled.deviations(from_bytes=WARN_FROM_BYTES)
        warnings = [*self._warnings, *spec.assembled.remarks, *deviations]
        facts = describe_run(
            spec.assembled,
            compiled,
            self._work,
            project=spec.output.project,
            name=spec.output.name,
            seed=spec.seed,
            dataset={
                "fingerprint": self._metadata.dataset,
                "num_samples": spec.data.num_samples,
                "description": spec.data.describe(),
            },
            warnings=warnings,
        )
        tracker.start(facts)
        if compiled.ledger is not None:
            self._write_json("ledger.json", compiled.ledger.model_dump(mode="json"))
        for warning in warnings:
            tracker.event("warning", 0, warning, {})
        for origin in take_origins():
            tracker.event("note", 0, origin, {})
        earlier = EarlierAttempts.from_environment()
        if earlier.failure:
            message = f"attempt {earlier.count + 1}, after {earlier.failure}"
            tracker.event("restart", self._updates_before, message, {"attempt": earlier.count + 1})
        if fewer := fewer_processes_note(self._plan):
            details = {"processes": process_count(), "mesh": dict(self._plan.mesh)}
            tracker.event("processes", self._updates_before, fewer, details)
        if self._evaluator is not None and (note := self._evaluator.samples.note()):
            tracker.event("note", 0, note, {})

    def _first_state(self, tracker: Tracker, progress: Progress) -> TrainState:
        """Return the state to start from, restored if there is a checkpoint to resume from."""
        if self._point is None:
            done = progress.update = self._spec.updates_done
            if done:
                tracker.event("resume", done, f"continuing after update {done}", {})
            elif self._spec.weights:
                tracker.event("weights", 0, self._spec.weights, {})
            with activity("initializing the state"):
                return self._spec.initial_state()
        with activity(f"restoring update {self._point.update}"):
            state = self._restore(tracker)
        point = self._point
        progress.update, progress.skipped = point.update, point.metadata.skipped
        progress.left_out[:] = map(list, point.metadata.left_out)
        self._continue_data(point)
        message = f"continuing after update {point.update}, from {point.path}"
        if CheckpointReader(point.folder).checksums(point.update) is None:
            message += ", which has no checksums to check its arrays with"
        tracker.event("resume", point.update, message, {"checkpoint": str(point.path)})
        for update, values in earlier_evaluations(point, self._run_dir):
            self._callbacks.on_recall(update, values)
        return state

    def _continue_data(self, point: ResumePoint) -> None:
        """Take data that is read in order to where it was, if the checkpoint says where."""
        data, position = self._spec.data, point.metadata.data_position
        if position is not None:
            data.go_to(point.update + count_batches(point.metadata.left_out), position)

    def _restore(self, tracker: Tracker) -> TrainState:
        """Restore the newest sound checkpoint; one that was asked for by name must be sound."""
        while True:
            assert self._point is not None
            try:
                return restore(self._point, self._form)
            except DamagedCheckpoint as error:
                if not self._point.same_run:
                    raise
                warning = set_damaged_aside(self._point.folder, error.damage)
                tracker.event("warning", 0, warning, {})
            self._point = find_resume_point("must", self._run_dir)
            for warning in self._check_resume_point():
                tracker.event("warning", 0, warning, {})
            self._set_damaged_aside()

    def _set_damaged_aside(self) -> None:
        """Rename the damaged checkpoints that were found with the resume point."""
        if self._point is not None and self._point.same_run:
            folder = self._point.folder
            self._warnings += [set_damaged_aside(folder, d) for d in self._point.damaged]

    def _finish(
        self, tracker: Tracker, state: TrainState, progress: Progress, seconds: float
    ) -> FitResult:
        stop, earlier = progress.stop, EarlierAttempts.from_environment()
        tracker.event(
            "stop", progress.update, stop.text, {"seconds": seconds, "reason": stop.reason.value}
        )
        return FitResult(
            losses=progress.losses,
            eval=progress.eval,
            updates=progress.update,
            updates_before=self._updates_before,
            seconds=seconds,
            stop=stop,
            state=state,
            programs=self._programs,
            metadata=self._metadata_at(progress.update),
            run_dir=self._run_dir,
            hf_files=self._spec.output.hf_files,
            goodput=earlier.goodput(own_heartbeat().useful, seconds),
            attempts=earlier.count + 1,
            skipped=progress.skipped - self._skipped_before,
            extra={} if stop.interrupted else self._spec.extra_results(state),
        )

    def _make_loop(
        self,
        compiled: CompiledStep,
        tracker: Tracker,
        checkpointer: Checkpointer,
        interrupt: Interrupt,
    ) -> Loop:
        spec, evaluator = self._spec, self._evaluator
        warn = partial(_log_warning, tracker)
        loader, limits = self._make_loader(), self._make_limits(interrupt)
        feed = BatchFeed(loader, self._progress.left_out)
        return Loop(
            step=compiled.run,
            loader=loader,
            feed=feed,
            recovery=self._make_recovery(feed, limits, tracker, checkpointer),
            limits=limits,
            meter=Meter(self._work, list(spec.assembled.mesh.devices.flat)),
            tracker=tracker,
            callbacks=self._callbacks,
            checkpointer=checkpointer,
            profiling=self._make_profiling(compiled),
            on_profile=partial(self._log_profile, tracker),
            evaluate=None if evaluator is None else lambda state: evaluator(state, warn),
            eval_every=spec.evaluation.every,
            prepare_evaluation=self._prepare_evaluation,
            log_every=spec.output.log_every,
            extra_metrics=self._extra_metrics,
            state_metrics=self._state_metrics,
            context=self._context,
        )

    def _make_loader(self) -> BatchLoader:
        spec = self._spec
        return BatchLoader(
            spec.data,
            batch_size=self._plan.batch.global_batch_size,
            sharding=spec.assembled.step.shardings.batch,
            workers=spec.loading.workers,
            prefetch=spec.loading.prefetch,
        )

    def _make_limits(self, interrupt: Interrupt) -> Limits:
        duration, updates = self._spec.duration, self._updates
        if duration.epochs is not None and updates is not None:
            updates -= count_batches(self._progress.left_out)
        return Limits(
            updates,
            duration.seconds,
            self._callbacks,
            interrupt,
            whole_data=duration.epochs is not None,
        )

    def _make_recovery(
        self, feed: BatchFeed, limits: Limits, tracker: Tracker, checkpointer: Checkpointer
    ) -> Recovery:
        spec = self._spec
        recorder = FlightRecorder(self._run_dir, spec.assembled, self._form, self._metadata_at)
        return Recovery(
            spec.nonfinite,
            feed=feed,
            form=self._form,
            recorder=recorder,
            checkpointer=checkpointer,
            rewind=partial(self._rewind, tracker),
            limits=limits,
            tracker=tracker,
            data=spec.data,
            batch_size=self._plan.batch.global_batch_size,
        )

    def _rewind(self, tracker: Tracker) -> tuple[CheckpointMetadata, TrainState]:
        """Restore the newest sound checkpoint of the run."""
        started_from = self._point
        self._point = find_resume_point("must", self._run_dir)
        state = self._restore(tracker)
        assert self._point is not None
        metadata, self._point = self._point.metadata, started_from
        return metadata, state

    def _check_rewinding(self) -> None:
        saves = self._run_dir is not None and self._spec.output.checkpoint.enabled
        if self._spec.nonfinite.action == "rewind" and not saves:
            raise UserError(
                f"{Setting('training.on_nonfinite', 'rewind')} needs checkpoints to go back to",
                why="the run has no folder"
                if self._run_dir is None
                else f"{Setting('checkpoint.enabled', False)}",
                fix=f"write {Setting('hydra.run.dir', ANY)}"
                if self._run_dir is None
                else f"write {Setting('checkpoint.enabled', True)}, or "
                f"{Setting('training.on_nonfinite', 'skip')}",
            )

    def _make_evaluator(self) -> Evaluator | None:
        evaluation = self._spec.evaluation
        if evaluation.data is None:
            return None
        evaluator = Evaluator(self._programs, evaluation.data, limit=evaluation.batches)
        evaluator.check()
        return evaluator

    def _prepare_evaluation(self) -> None:
        # A profile would show the compiler at work.
        if self._evaluator is not None and not self._spec.output.profile:
            self._evaluator.compile_ahead()

    def _make_profiling(self, compiled: CompiledStep) -> NoProfiling:
        if not self._spec.output.profile or self._run_dir is None:
            return NoProfiling()
        return Profiling(self._run_dir / "trace", self._spec.assembled.mesh, compiled.text)

    def _log_profile(self, tracker: Tracker, update: int, profile: Profile) -> None:
        self._write_json("profile.json", profile.to_json())
        shares = ", ".join(f"{n.replace('_', ' ')} {s:.0%}" for n, s in profile.shares.items())
        message = f"{profile.updates} updates of {profile.seconds_per_update:.3f} s: {shares}"
        tracker.event("profile", update, message, {"shares": profile.shares})
        for advice in profile.advice:
            tracker.event("warning", update, advice, {})

    def _write_json(self, name: str, content: Any) -> None:
        if self._run_dir is not None and is_main():
            (self._run_dir / name).write_text(json.dumps(content), encoding="utf-8")

    def _make_checkpointer(self, tracker: Tracker) -> Checkpointer:
        config = self._spec.output.checkpoint
        if self._run_dir is None or not config.enabled:
            return NullCheckpointer()
        store = CheckpointStore(
            self._run_dir / FOLDER, keep_last=config.keep_last, keep_best=config.keep_best
        )
        self._form.prepare()
        return BackgroundCheckpointer(
            store,
            self._form,
            self._metadata_at,
            every=config.every,
            last_saved=_saved_by_this_run(self._point),
            log_event=tracker.event,
        )

    def _make_metadata(self) -> CheckpointMetadata:
        """Return the metadata of the run's checkpoints, which differ in the update only."""
        return CheckpointMetadata(
            update=0,
            seed=self._spec.seed,
            dataset=self._spec.data.fingerprint(),
            global_batch_size=self._plan.batch.global_batch_size,
            plan=self._plan.model_dump(mode="json"),
            config=self._spec.config,
            versions=package_versions(),
            processes=process_count(),
        )

    def _metadata_at(self, update: int) -> CheckpointMetadata:
        progress = self._progress
        number = update + count_batches(progress.left_out)
        return replace(
            self._metadata,
            update=update,
            data_position=self._spec.data.position(number),
            skipped=progress.skipped,
            left_out=tuple(map(tuple, progress.left_out)),
        )

    @property
    def _updates_before(self) -> int:
        return self._spec.updates_done if self._point is None else self._point.update

    @property
    def _skipped_before(self) -> int:
        return 0 if self._point is None else self._point.metadata.skipped

    @cached_property
    def _advice(self) -> MemoryAdvice:
        saves = self._run_dir is not None and self._spec.output.checkpoint.enabled
        return MemoryAdvice(
            self._spec.assembled,
            make_estimator=self._spec.estimator,
            resumable=lambda: saves and newest_checkpoint(self._run_dir) is not None,
        )

    @cached_property
    def _form(self) -> CanonicalForm:
        return CanonicalForm(self._spec.assembled)

    @cached_property
    def _work(self) -> Work:
        return work_per_update(self._spec.assembled, self._spec.batch)

    def _state_metrics(self, state: TrainState) -> dict[str, Any]:
        number = injected_rate(self._spec.assembled.step.optimizer.leaves)
        if self._spec.learning_rate is not None or number is None:
            return {}
        # A copy, because the next update reuses the state's memory.
        return {"learning_rate": jnp.copy(state.optimizer[number])}

    def _extra_metrics(self, update: int) -> dict[str, float]:
        if self._spec.learning_rate is None:
            return {}
        # On a CPU, where it does not wait for the step.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return {"learning_rate": float(self._spec.learning_rate(update - 1))}


def _facts(spec: RunSpec) -> Facts:
    """Return what must be the same in every process, or they would wait for each other."""
    output, evaluation = spec.output, spec.evaluation
    return {
        **spec.settings,
        "plan": spec.assembled.plan.model_dump(mode="json"),
        "model": {
            leaf.path: f"{leaf.role} {leaf.dtype}{list(leaf.shape)}"
            for leaf in spec.assembled.traced.layout.leaves
        },
        "data": spec.data.fingerprint(),
        "duration": asdict(spec.duration),
        "seed": spec.seed,
        "eval_every": evaluation.every,
        "eval_batches": evaluation.batches,
        "eval_data": None if evaluation.data is None else evaluation.data.fingerprint(),
        "log_every": output.log_every,
        "checkpoint": output.checkpoint.model_dump(mode="json"),
        "nonfinite": asdict(spec.nonfinite),
        "run_dir": None if output.run_dir is None else str(output.run_dir),
        "version": {**package_versions(), "meshwright code": own_code()},
        "devices": describe_own_devices(),
        "code": users_code(*spec.code),
    }


def _check_early_stopping(callbacks: Sequence[Callback], evaluation: EvaluationSpec) -> None:
    if not any(isinstance(callback, EarlyStopping) for callback in callbacks):
        return
    if evaluation.data is None:
        raise UserError(
            "early stopping counts evaluations, and there is no data to evaluate on",
            fix=f"hold out data with {Setting('data.eval_fraction', ANY)}, or leave out early "
            "stopping",
        )
    if evaluation.every is None:
        raise UserError(
            "early stopping counts evaluations, and there is only one, at the end",
            why=f"{Setting('training.eval_every')} is not set",
            fix=f"write {Setting('training.eval_every', ANY)} too",
        )


def _saved_by_this_run(point: ResumePoint | None) -> int | None:
    """Return the update of the newest checkpoint in the run folder; None if it has none."""
    return point.update if point is not None and point.same_run else None


def _log_warning(tracker: Tracker, message: str) -> None:
    tracker.event("warning", 0, message, {})
