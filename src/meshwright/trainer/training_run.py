"""A training run: checks what was asked for, compiles the step, finds its state, and trains."""

import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

from meshwright.checkpoint.reader import RUN_ID
from meshwright.config.duration import Duration
from meshwright.data.batches import form_of
from meshwright.data.document_marks import named_ends
from meshwright.data.mixture import MixtureData
from meshwright.data.protocols import Data
from meshwright.data.rollout_data import RolloutData
from meshwright.errors import NotFinite, OutOfMemory, first_line
from meshwright.inputs.user_model import model_source
from meshwright.plan import Plan, unused_pipeline
from meshwright.planner.fit.fit_check import check_memory, warn_of_compiled
from meshwright.planner.fit.out_of_memory import KnownProgram, MemoryAdvice
from meshwright.processes import barrier, broadcast, process_count
from meshwright.processes.handshake import compare_processes
from meshwright.processes.library_messages import is_lost_peer
from meshwright.processes.peers import explain_loss
from meshwright.profile import NoProfiling, Profiling
from meshwright.runtime.heartbeat import Doing, own_heartbeat
from meshwright.runtime.interrupt import Interrupt, Phase, current_interrupt
from meshwright.step.state import TrainState
from meshwright.tracking.setup import check_tracking, make_trackers
from meshwright.trainer.batch_loader import BatchFeed, BatchLoader, count_batches
from meshwright.trainer.callbacks import CallbackContext, Callbacks
from meshwright.trainer.checkpointer import Checkpointer, RunMetadata, make_checkpointer
from meshwright.trainer.evaluating.evaluation import Evaluator
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.incidents.flight_record import FlightRecorder
from meshwright.trainer.incidents.recovery import Recovery
from meshwright.trainer.limits import Limits
from meshwright.trainer.loop import Loop
from meshwright.trainer.programs import (
    WARN_FROM_BYTES,
    CompiledStep,
    Programs,
    compile_step,
    refuse_deviations,
)
from meshwright.trainer.rollouts.rollout import RewardEvaluator, Rollouts
from meshwright.trainer.run_dir import RunLock, check_disk_space, make_run_folder, write_files
from meshwright.trainer.run_log import (
    RunLog,
    attempts_so_far,
    describe_run,
    failed_summary,
    work_per_step,
)
from meshwright.trainer.run_progress import Meter, Progress, Work
from meshwright.trainer.starting.from_initial import fill_tables
from meshwright.trainer.starting.learning_rate import LearningRate, find_schedule
from meshwright.trainer.starting.planning import check_context, estimator_for
from meshwright.trainer.starting.process_facts import process_facts
from meshwright.trainer.starting.restoring import Restoring, newest_checkpoint, with_resuming
from meshwright.trainer.starting.resume import check_newest, run_id
from meshwright.trainer.starting.run_warnings import (
    check_early_stopping,
    check_rewinding,
    no_rate_left,
    over_sharded,
    repeated_samples,
)
from meshwright.trainer.starting.same_training import training_facts
from meshwright.trainer.starting.start import Start
from meshwright.trainer.starting.step_key import step_key
from meshwright.trainer.trained.base_weights import keep_base
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.trained.text_sample import generate_sample
from meshwright.trainer.trainer_settings import TrainerSettings, read_pipeline
from meshwright.weights.kept import HF_FOLDER


class TrainingRun:
    """A training run that has passed all checks that need no compilation.

    The constructor checks; nothing is written or compiled before `run`.
    """

    def __init__(
        self,
        trainer: TrainerSettings,
        asked: FitSettings,
        programs: Programs,
        batch: Any,
        start: Start,
    ) -> None:
        self._trainer, self._asked, self._start = trainer, asked, start
        self._programs, self._form, self._batch = programs, programs.form, batch
        self._assembled, self._plan = programs.assembled, programs.assembled.plan
        assert asked.data is not None
        assert asked.duration is not None
        self._data, self._duration, self._run_dir = asked.data, asked.duration, asked.run_dir
        if process_count() > 1:
            compare_processes(process_facts(trainer, asked, self._assembled))
        self._context = CallbackContext(self._assembled)
        self._callbacks = Callbacks(asked.callbacks, self._context)
        # A folder that cannot be read is refused before training.
        ends = [token for token, _ in named_ends(start.hf_files.get)] if asked.recipe else []
        self._sample = partial(generate_sample, asked, self._assembled, ends=ends)
        self._estimator = partial(estimator_for, trainer, batch)
        check_early_stopping(asked, programs)
        check_tracking(asked.tracking, self._run_dir)
        self._steps = _count_steps(self._duration, self._data, self._plan)
        self._progress = Progress()
        kept = asked.run_dir is not None or start.point is not None
        training = broadcast(training_facts(trainer, self._assembled)) if kept else {}
        run = "" if asked.run_dir is None else run_id(asked.run_dir, start.point)
        self._metadata = RunMetadata(asked, trainer.seed, self._plan, self._progress, training, run)
        self._rollouts = _make_rollouts(trainer, asked, programs, start, run, self._context)
        self._evaluator = self._make_evaluator()
        self._restoring = Restoring(start, asked, self._assembled, self._form, self._metadata)
        check_rewinding(trainer.on_nonfinite, asked)
        size = self._assembled.model_leaves.num_parameters
        self._warnings = [
            *asked.warnings,
            *unused_pipeline(read_pipeline(trainer.pipeline), self._plan),
            *start.remarks,
            *self._restoring.check(),
            *repeated_samples(self._plan.batch.global_batch_size, self._data.num_samples),
            *filter(None, [self._data.order if kept else ""]),
            *self._assembled.traced.wrong_indices(batch),
            *(over_sharded(self._plan, size) if asked.recipe else ()),
            *no_rate_left(self._schedule, self._restoring.steps_before, self._steps),
            *check_memory(self._assembled, self._estimator),
            *filter(None, [self._rollouts.rewards.note if self._rollouts else ""]),
        ]

    def run(self) -> FitResult:
        """Train in the run folder, which is locked for other runs."""
        self._asked.on_checked()
        heartbeat = own_heartbeat()
        heartbeat.begin()
        try:
            return self._run() if self._run_dir is None else self._run_in_folder(self._run_dir)
        finally:
            heartbeat.mark(Doing.ENDED)

    def _run_in_folder(self, run_dir: Path) -> FitResult:
        own_heartbeat().report(run_dir=str(run_dir.absolute()))
        make_run_folder(run_dir)
        lock = RunLock(run_dir)
        lock.acquire()
        try:
            check_newest(self._restoring.point, run_dir)
            self._warnings += check_disk_space(run_dir, self._form.structs, self._asked.checkpoint)
            write_files(run_dir, _files(self._asked, self._plan, self._metadata))
            write_files(run_dir / HF_FOLDER, self._start.hf_files)
            self._warnings += self._restoring.set_damaged_aside()
            return self._run()
        finally:
            lock.release()

    def _run(self) -> FitResult:
        """Train; after a failure the checkpointer and the trackers are closed as well."""
        started = time.perf_counter()
        asked, progress = self._asked, self._progress
        with self._advice.during(lambda: "compiling the step"):
            compiled = self._programs.step(self._batch, self._compile)
        known = KnownProgram(compiled.memory, compiled.text)
        self._warnings += warn_of_compiled(self._assembled, compiled.memory)
        if asked.strict:
            refuse_deviations([*self._assembled.remarks, *compiled.deviations()])
        tracker = make_trackers(
            asked.tracking, self._run_dir, total_steps=self._steps, progress=asked.progress
        )
        log, interrupt = RunLog(tracker, self._run_dir), current_interrupt() or Interrupt()
        # A signal ends a process at once until here; from here on all processes stop together.
        barrier("compiled")
        interrupt.phase = Phase.TRAINING
        checkpointer = Checkpointer()
        summary: dict[str, Any] = {}
        try:
            self._log_start(log, compiled)
            with self._advice.during(lambda: "placing the state", known):
                state = self._restoring.first_state(tracker, progress, self._callbacks)
                fill_tables(self._programs, state, self._trainer.loss, self._restoring, tracker)
                self._keep_base(state)
                point = self._restoring.point
                checkpointer = make_checkpointer(
                    asked,
                    self._form,
                    self._metadata,
                    last_saved=point.step if point is not None and point.same_run else None,
                    log_event=tracker.event,
                    step_memory=compiled.memory,
                )
            loop = self._make_loop(compiled, log, checkpointer, interrupt)
            with (
                interrupt.watch(),
                loop.limits.watching(),
                self._advice.during(progress.near, known),
            ):
                state = loop.train(state, progress)
            interrupt.phase = Phase.ENDED
            seconds = time.perf_counter() - started
            _log_mixture(log, self._data, progress, self._plan)
            log.stop(progress, seconds)
            result = self._result(state, seconds)
            summary = result.summary()
        except BaseException as error:
            checkpointer.abandon()
            _explain_failure(error, log, progress, self._run_dir)
            if isinstance(error, NotFinite):
                seconds = time.perf_counter() - started
                summary = failed_summary(progress, error, skipped=self._skipped, seconds=seconds)
            raise
        finally:
            tracker.close(summary)
        return result

    def _compile(self) -> CompiledStep:
        # A profile would show the compiler at work.
        evaluator = None if self._asked.profile else self._evaluator
        return compile_step(
            self._assembled,
            self._batch,
            meanwhile=self._restoring.prepare,
            if_long=evaluator and evaluator.compile_ahead,
            key=step_key(self._asked, self._assembled, self._metadata.training),
        )

    def _keep_base(self, state: TrainState) -> None:
        """Remember the weights that are not trained, once."""
        if self._run_dir is not None and self._asked.checkpoint.enabled:
            metadata, weights, lora = self._metadata.at(0), self._start.weights, self._trainer.lora
            adapters = None if lora is None else lora.init_from
            keep_base(
                self._run_dir, self._assembled, self._form, state, metadata, weights, adapters
            )

    def _log_start(self, log: RunLog, compiled: CompiledStep) -> None:
        deviations = compiled.deviations(from_bytes=WARN_FROM_BYTES)
        facts = describe_run(
            self._trainer,
            self._asked,
            self._assembled,
            compiled,
            self._work,
            fingerprint=self._metadata.dataset,
            warnings=[*self._warnings, *self._assembled.remarks, *deviations],
        )
        log.start(
            facts,
            compiled.ledger,
            self._plan,
            before=self._restoring.steps_before,
            note="" if self._evaluator is None else self._evaluator.note(),
        )
        log.samples(self._data)

    @property
    def _skipped(self) -> int:
        """Steps of this run that were skipped."""
        point = self._restoring.point
        return self._progress.skipped - (0 if point is None else point.metadata.skipped)

    def _result(self, state: TrainState, seconds: float) -> FitResult:
        progress, hf_files = self._progress, self._start.hf_files
        if self._rollouts is not None:
            # A result lives longer than its run.
            self._rollouts.release()
        extra: dict[str, Any] = {}
        if self._asked.recipe is not None and not progress.stop.interrupted:
            sample = self._sample(state)
            if sample is not None:
                extra = dict(zip(("sample", "grade", "completions"), sample, strict=True))
        return FitResult(
            losses=progress.losses,
            rewards=progress.rewards,
            eval=progress.eval,
            steps=progress.step,
            steps_before=self._restoring.steps_before,
            seconds=seconds,
            stop=progress.stop,
            state=state,
            programs=self._programs,
            metadata=self._metadata.at(progress.step),
            run_dir=self._run_dir,
            hf_files=hf_files,
            skipped=self._skipped,
            extra=extra,
            tokenizer=self._data.tokenizer,
            rollouts=self._rollouts,
            **attempts_so_far(seconds),
        )

    def _make_loop(
        self, compiled: CompiledStep, log: RunLog, checkpointer: Checkpointer, interrupt: Interrupt
    ) -> Loop:
        trainer, asked = self._trainer, self._asked
        batch_size = self._plan.batch.global_batch_size
        loader = BatchLoader(
            self._data,
            batch_size=batch_size,
            sharding=self._assembled.step.shardings.batch,
            workers=asked.workers,
            prefetch=asked.prefetch,
            like=form_of(self._batch),
        )
        limits = self._make_limits(interrupt)
        if self._rollouts is not None:
            self._rollouts.tracker = log.tracker
        feed = BatchFeed(loader, self._progress.left_out, limits.end_of_data)
        recovery = Recovery(
            trainer=trainer,
            feed=feed,
            form=self._form,
            recorder=FlightRecorder(self._run_dir, self._assembled, self._metadata.at),
            checkpointer=checkpointer,
            rewind=partial(self._restoring.rewind, log.tracker),
            limits=limits,
            tracker=log.tracker,
            data=self._data,
            batch_size=batch_size,
        )
        rate = LearningRate(self._schedule, self._assembled.step.optimizer.leaves)
        profiling = NoProfiling()
        if asked.profile and self._run_dir is not None:
            profiling = Profiling(self._run_dir / "trace", self._assembled.mesh, compiled.text)
        return Loop(
            step=compiled.run,
            feed=feed,
            recovery=recovery,
            limits=limits,
            meter=Meter(self._work, list(self._assembled.mesh.devices.flat)),
            log=log,
            callbacks=self._callbacks,
            checkpointer=checkpointer,
            profiling=profiling,
            evaluator=self._evaluator,
            eval_every=asked.eval_every,
            sample=self._sample,
            sample_every=asked.sample_every,
            evaluate_ahead=not asked.profile,
            log_every=trainer.log_every,
            rate=rate,
            context=self._context,
        )

    def _make_limits(self, interrupt: Interrupt) -> Limits:
        steps, by_epochs = self._steps, self._duration.epochs is not None
        if by_epochs and steps is not None:
            steps -= count_batches(self._progress.left_out)
        return Limits(steps, self._duration.seconds, self._callbacks, interrupt, by_epochs)

    def _make_evaluator(self) -> Evaluator | RewardEvaluator | None:
        asked, ema = self._asked, self._trainer.eval_ema
        if asked.eval_data is None:
            return None
        if self._rollouts is not None:
            return RewardEvaluator(self._rollouts, asked.eval_data, asked.eval_batches)
        evaluator = Evaluator(self._programs, asked.eval_data, limit=asked.eval_batches, ema=ema)
        evaluator.check()
        return evaluator

    @cached_property
    def _schedule(self) -> Callable[[int], Any] | None:
        recipe = self._asked.recipe
        return recipe.learning_rate if recipe else find_schedule(self._trainer.optimizer)

    @cached_property
    def _advice(self) -> MemoryAdvice:
        return MemoryAdvice(
            self._assembled,
            make_estimator=self._estimator,
            resumable=lambda: self._asked.saves and newest_checkpoint(self._run_dir) is not None,
        )

    @cached_property
    def _work(self) -> Work:
        return work_per_step(self._assembled, self._batch)


def _count_steps(duration: Duration, data: Data, plan: Plan) -> int | None:
    """Return how many steps to do; None if a time or the end of the data decides."""
    if duration.epochs is not None and data.stop_after(duration.epochs):
        return None
    size = plan.batch.global_batch_size
    return duration.total_steps(num_samples=data.num_samples, batch_size=size)


def _files(asked: FitSettings, plan: Plan, metadata: RunMetadata) -> dict[str, str]:
    """Return the files that are written to the run folder at the start, by name."""
    config = dict(asked.config)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    written = {"config.yaml": text} if config else {}
    own = {"plan.yaml": plan.to_yaml(), RUN_ID: f"{metadata.run}\n"}
    return {**asked.files, **written, **own}


def _explain_failure(
    error: BaseException, log: RunLog, progress: Progress, run_dir: Path | None
) -> None:
    """Record why a run failed; raise an error that says more, if there is one."""
    if is_lost_peer(error):
        own_heartbeat().report(lost_peer=True)
        if lost := explain_loss():
            log.failed(progress, lost.what)
            raise lost from error
    log.failed(progress, first_line(error))
    if isinstance(error, OutOfMemory):
        raise with_resuming(error, run_dir) from error.__cause__


def _log_mixture(log: RunLog, data: Data, progress: Progress, plan: Plan) -> None:
    """Record how many rows each source of a mixture has given."""
    if isinstance(data, MixtureData):
        done = progress.step + count_batches(progress.left_out)
        log.mixture(progress.step, data.counts(done, plan.batch.global_batch_size))


def _make_rollouts(
    trainer: TrainerSettings,
    asked: FitSettings,
    programs: Programs,
    start: Start,
    run: str,
    context: CallbackContext,
) -> Rollouts | None:
    """Return what makes the batches of a training that learns from rewards; None for others."""
    if not isinstance(asked.data, RolloutData):
        return None
    source = model_source(trainer.model, trainer.loss, lambda: programs.batch_like)
    check_context(asked.data.task, source)
    rollouts = Rollouts(
        asked.data,
        programs,
        current=lambda: context.state,
        initial=start.initial or start.state,
        seed=trainer.seed,
        run_dir=asked.run_dir,
        run=run,
        resumed=start.point and start.point.folder.parent,
        hf_files=start.hf_files,
        log_every=trainer.log_every,
    )
    for prompts in filter(None, (asked.data.prompts, asked.eval_data)):
        rollouts.check(prompts)
    return rollouts
