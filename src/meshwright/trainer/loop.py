"""The training loop: reads batches, runs steps, reports metrics, saves checkpoints."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from meshwright.checkpoint.store import StateNotFinite
from meshwright.processes import process_count
from meshwright.profile import NoProfiling
from meshwright.runtime.heartbeat import Doing, Heartbeat, own_heartbeat
from meshwright.runtime.hooks import log_hooks
from meshwright.step.state import TrainState
from meshwright.step.train_step import HALTED
from meshwright.trainer.batch_loader import BatchFeed
from meshwright.trainer.callbacks import CallbackContext, Callbacks
from meshwright.trainer.checkpointer import Checkpointer
from meshwright.trainer.evaluating.evaluation import Evaluator
from meshwright.trainer.incidents.not_finite import BadStep, FiniteCheck
from meshwright.trainer.incidents.recovery import Recovery
from meshwright.trainer.limits import Limits
from meshwright.trainer.programs import StepFunction
from meshwright.trainer.rollouts.rollout import RewardEvaluator
from meshwright.trainer.run_log import RunLog
from meshwright.trainer.run_progress import (
    ALL_DONE,
    NONE_ASKED,
    Meter,
    Metrics,
    Progress,
    Stop,
    out_of_batches,
)
from meshwright.trainer.starting.learning_rate import LearningRate
from meshwright.trainer.trained.text_sample import TextSample

NO_GRADIENT = (
    "the gradient of the first step is zero: no trained parameter changes the loss; a loss of "
    "argmax, of counts or of comparisons has no gradient"
)
"""Logged once, since training would continue without changing anything."""

MISMATCH = 5e-3
"""Ten times what rounding in bf16 makes of the mean k3 of a token."""
NOT_THE_SAMPLER = (
    "the model gives tokens other probabilities when it trains than when it sampled them (see "
    "`mismatch`): does it see later tokens, or draw random numbers in evaluation mode?"
)


@dataclass(kw_only=True)
class Loop:
    """The training loop and its parts; a part that is switched off is a null object.

    Without ``eval_every``, there is a single evaluation at the end, and without ``sample_every`` no
    text during training. ``shares`` are where the time of a step goes, once it has been profiled,
    until it is logged.
    """

    step: StepFunction
    feed: BatchFeed
    recovery: Recovery
    limits: Limits
    meter: Meter
    log: RunLog
    callbacks: Callbacks
    checkpointer: Checkpointer
    profiling: NoProfiling
    evaluator: Evaluator | RewardEvaluator | None
    eval_every: int | None
    sample: Callable[[TrainState], TextSample | None]
    sample_every: int | None
    log_every: int
    rate: LearningRate
    context: CallbackContext
    evaluate_ahead: bool = True
    shares: Metrics = field(default_factory=dict[str, float])
    finite_check: FiniteCheck = field(default_factory=FiniteCheck)
    _latest: Any = field(default=None, init=False)
    heartbeat: Heartbeat = field(default_factory=own_heartbeat)

    def train(self, state: TrainState, progress: Progress) -> TrainState:
        """Train from ``progress.step`` until a limit is reached, and return the final state."""
        try:
            return self._train(state, progress)
        except StateNotFinite as error:
            raise self.finite_check.state_error(error.step) from None

    def _train(self, state: TrainState, progress: Progress) -> TrainState:
        self.heartbeat.start_from(progress.step)
        self.context.at(progress.step, state)
        self.callbacks.call("on_start", progress.step)
        if self.recovery.rewinds:
            self.checkpointer.save(state, progress.step, loss=None)
        first, last = progress.step + 1, self.limits.steps
        # A resumed run may have had its reason to stop before the checkpoint.
        if progress.step and (stop := self.limits.stop()):
            progress.stop, last = stop, progress.step
        with self.feed.open(progress.step, last):
            self.meter.restart(progress.step, self.feed.waited)
            while last != progress.step:
                try:
                    state = self._steps(state, progress, first)
                    break
                except BadStep as bad:
                    with self.heartbeat.during(Doing.SAVING):
                        state = self.recovery.handle(bad, self._latest, self.finite_check, progress)
                    self.context.at(progress.step, state)
                    progress.stop = ALL_DONE
        self.profiling.close()
        done, steps = progress.step, self.limits.steps
        unfinished = steps is None or done < steps
        if steps == 0 and progress.stop is ALL_DONE:
            progress.stop = NONE_ASKED
        if progress.stop is ALL_DONE and unfinished and not self.limits.whole_data:
            progress.stop = out_of_batches(done, steps, self.limits.seconds)
        self._end(state, progress)
        return state

    def _steps(self, state: TrainState, progress: Progress, first: int) -> TrainState:
        """Run steps until a limit is reached; raise `BadStep` for one that is not finite."""
        to_log: tuple[int, Any] | None = None
        done, metrics = progress.step, None
        mark = self.heartbeat.mark
        mark(Doing.INPUT)
        while (batch := self.feed.next(done + 1, self.limits.steps)) is not None:
            # Beginning a step may mean waiting for other processes.
            mark(Doing.DISPATCHING, done + 1)
            if stop := self.limits.before_step(done + 1):
                progress.stop = stop
                break
            state, metrics = self.step(state, batch)
            self._latest = state
            done = progress.step = done + 1
            self.context.at(done, state)
            mark(Doing.WAITING)
            self.finite_check.add(done, metrics)
            mark(Doing.TRAINING)
            self.checkpointer.poll()
            self._profile(metrics, progress)
            reported = to_log is not None
            if to_log is not None:
                # One step late, so that the devices already work on the next one.
                self._log(*to_log, progress)
                to_log = None
            if done == first:
                if self.evaluator is not None and self.evaluate_ahead:
                    with self.heartbeat.during(Doing.COMPILING):
                        self.evaluator.compile_ahead()
                # Logged alone: its time includes one-time work, such as filling caches.
                self._log(done, self._with_rate(metrics, state), progress)
            elif done % self.log_every == 0:
                to_log = (done, self._with_rate(metrics, state))
            if to_log is not None and self._evaluates(done):
                # What is measured after a step follows what the step itself gave.
                self._log(*to_log, progress)
                to_log, reported = None, True
            reported |= self._evaluate_and_save(state, progress)
            if (reported or self.limits.urgent) and (stop := self._agreed_stop()):
                progress.stop = stop
                break
            mark(Doing.INPUT)
        mark(Doing.WAITING)
        self.finite_check.look(done)
        if metrics is not None and done not in progress.losses:
            self._log(done, self._with_rate(metrics, state), progress)
        return state

    def _with_rate(self, metrics: Any, state: TrainState) -> Any:
        # Whatever computes on the devices of the mesh may have to wait for the step.
        with self.heartbeat.during(Doing.WAITING):
            return metrics | self.rate.of_state(state)

    def _agreed_stop(self) -> Stop | None:
        with self.heartbeat.during(Doing.WAITING):
            return self.limits.stop()

    def _profile(self, metrics: Any, progress: Progress) -> None:
        started = time.perf_counter()
        profile = self.profiling.after(metrics, self.feed.waited)
        if profile is None:
            return
        self.meter.exclude(time.perf_counter() - started)
        self.shares = {f"{name}_share": share for name, share in profile.shares.items()}
        self.log.profile(progress.step, profile)

    def _log(self, step: int, metrics: Any, progress: Progress) -> None:
        with self.heartbeat.during(Doing.WAITING):
            self.finite_check.look(step)
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            # On CPU meshes this waits for the devices, too, which is not this process's own work.
            values |= self.rate.of_step(step - progress.skipped)
        with self.heartbeat.during(Doing.CALLBACKS):
            self._report(step, values, progress)

    def _report(self, step: int, values: Metrics, progress: Progress) -> None:
        values.pop(HALTED, None)
        if progress.skipped:
            values["skipped"] = values.get("skipped", 0.0) + progress.skipped
        # Shares are of the steps that were profiled, and so written once.
        values |= self.meter.read(progress.step, self.feed.waited) | self.shares
        self.shares = {}
        progress.losses[step] = values["loss"]
        rewarded = "zero_variance" in values
        if rewarded:
            progress.rewards[step] = values["reward"]
        self.context.metrics = values
        self.log.tracker.log("train", step, values)
        if step == 1 and values["grad_norm"] == 0 and not rewarded:
            self.log.tracker.event("warning", step, NO_GRADIENT, {})
        if step == 1 and values.get("mismatch", 0) > MISMATCH:
            self.log.tracker.event("warning", step, NOT_THE_SAMPLER, {})
        for hook in log_hooks:
            hook(step)
        self.callbacks.call("on_log", step, values)

    def _evaluate_and_save(self, state: TrainState, progress: Progress) -> bool:
        """Evaluate and save if due, outside the measured time; return whether it evaluated."""
        step, started = progress.step, time.perf_counter()
        evaluating = self._evaluates(step)
        saving = self.context.take_save() | self.checkpointer.due(step)
        if evaluating or saving:
            # What is saved under the number of a step must have all steps up to it.
            with self.heartbeat.during(Doing.WAITING):
                self.finite_check.look(step)
        if evaluating:
            self._evaluate(state, progress)
        # A callback may ask during the evaluation.
        saving |= self.context.take_save()
        if saving:
            self._save(state, progress)
        sampling = self.sample_every is not None and step % self.sample_every == 0
        if sampling:
            self._sample(state, step)
        if evaluating or saving or sampling:
            self.meter.exclude(time.perf_counter() - started)
        return evaluating

    def _sample(self, state: TrainState, step: int) -> None:
        with self.heartbeat.during(Doing.EVALUATING):
            sample = self.sample(state)
        if sample is not None:
            more = {"completions": sample.completions} if sample.completions else {}
            self.log.tracker.event("sample", step, sample.text, more)

    def _evaluates(self, step: int) -> bool:
        return self.eval_every is not None and step % self.eval_every == 0

    def _evaluate(self, state: TrainState, progress: Progress) -> None:
        if self.evaluator is None or progress.step in progress.eval:
            return
        with self.heartbeat.during(Doing.EVALUATING):
            try:
                values = self.evaluator(state, self.log.warn)
            except Exception:
                # Others may not have failed, and would not take part.
                if process_count() == 1:
                    self._save(state, progress)
                raise
            self._report_evaluation(values, progress)

    def _report_evaluation(self, values: Metrics, progress: Progress) -> None:
        progress.eval[progress.step] = self.context.eval_metrics = values
        self.log.tracker.log("eval", progress.step, values)
        if not math.isfinite(values["loss"]):
            message = f"the loss on held-out data is {values['loss']}, which is never the best"
            self.log.tracker.event("warning", progress.step, message, {})
        self.callbacks.call("on_eval", progress.step, values)

    def _save(self, state: TrainState, progress: Progress) -> None:
        evaluated = progress.eval.get(progress.step)
        loss = evaluated["loss"] if evaluated else None
        with self.heartbeat.during(Doing.SAVING):
            if self.checkpointer.save(state, progress.step, loss=loss):
                self.heartbeat.saved(progress.step)
                self.callbacks.call("on_checkpoint", progress.step)

    def _end(self, state: TrainState, progress: Progress) -> None:
        if not progress.stop.interrupted:
            self._evaluate(state, progress)
        # A run that is interrupted before its first step has nothing to save.
        if progress.step or not progress.stop.interrupted:
            self._save(state, progress)
        with self.heartbeat.during(Doing.SAVING):
            self.checkpointer.finish()
        self.callbacks.call("on_end", progress.step)
