"""The training loop: reads batches, runs updates, reports metrics, saves checkpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshwright.errors import UserError
from meshwright.profile import NoProfiling, Profile
from meshwright.step.state import TrainState
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.batch_loader import BatchLoader
from meshwright.trainer.callback_context import CallbackContext
from meshwright.trainer.callbacks import Callback
from meshwright.trainer.checkpointer import Checkpointer
from meshwright.trainer.compiled_step import StepFunction
from meshwright.trainer.limits import Limits
from meshwright.trainer.meter import Meter
from meshwright.trainer.stop import ALL_DONE, Stop, out_of_batches

MAX_IN_FLIGHT = 2
"""Updates dispatched to the devices before the loop waits for the first of them."""

Metrics = dict[str, float]


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        update: updates done.
        losses: the mean loss of every logged update, by its number from 0.
        eval: the metrics of every evaluation, by updates done.
        stop: why the run ended.
    """

    update: int = 0
    losses: dict[int, float] = field(default_factory=dict[int, float])
    eval: dict[int, Metrics] = field(default_factory=dict[int, Metrics])
    stop: Stop = ALL_DONE


@dataclass(kw_only=True)
class Loop:
    """The training loop and its parts; a part that is switched off is a null object.

    Attributes:
        step: the compiled step.
        loader: loads batches onto the devices.
        limits: decide when the run ends.
        meter: measures speed.
        tracker: records metrics and events.
        callbacks: the user's callbacks.
        checkpointer: saves checkpoints.
        profiling: profiles a few updates.
        on_profile: called with the updates done and the profile.
        evaluate: from a state to its metrics on held-out data; None for no evaluation.
        eval_every: updates between two evaluations; None for a single one at the end.
        log_every: updates between two logged updates.
        extra_metrics: further metrics of an update, such as its learning rate.
        state_metrics: further metrics as arrays, from the state after an update.
        context: what callbacks read of the run, and ask for.
        shares: how the time of an update divides, once it has been profiled.
    """

    step: StepFunction
    loader: BatchLoader
    limits: Limits
    meter: Meter
    tracker: Tracker
    callbacks: Callback
    checkpointer: Checkpointer
    profiling: NoProfiling
    on_profile: Callable[[int, Profile], None]
    evaluate: Callable[[TrainState], Metrics] | None
    eval_every: int | None
    log_every: int
    extra_metrics: Callable[[int], Metrics]
    state_metrics: Callable[[TrainState], dict[str, Any]]
    context: CallbackContext
    shares: Metrics = field(default_factory=dict[str, float])

    def train(self, state: TrainState, progress: Progress) -> TrainState:
        """Train from ``progress.update`` until a limit is reached, and return the final state."""
        self.context.at(progress.update, state)
        self.callbacks.on_start(progress.update)
        to_log: tuple[int, Any] | None = None
        in_flight: deque[Any] = deque()
        first, done, metrics = progress.update + 1, progress.update, None
        last = self.limits.updates
        # A resumed run may have had its reason to stop before the checkpoint.
        if done and (stop := self.limits.stop()):
            progress.stop, last = stop, done
        with self.loader.open(done, last) as batches:
            self.meter.restart(done, self.loader.waited)
            for batch in batches:
                if stop := self.limits.before_update(done + 1):
                    progress.stop = stop
                    break
                state, metrics = self.step(state, batch)
                done = progress.update = done + 1
                self.context.at(done, state)
                self._wait(in_flight, metrics)
                self._profile(metrics, progress)
                reported = to_log is not None
                if to_log is not None:
                    # One update late, so that the devices already work on the next one.
                    self._log(*to_log, progress, state)
                    to_log = None
                if done == first:
                    # Logged alone: its time includes one-time work, such as filling caches.
                    self._log(done, metrics | self.state_metrics(state), progress, state)
                elif done % self.log_every == 0:
                    to_log = (done, metrics | self.state_metrics(state))
                reported |= self._evaluate_and_save(state, progress)
                if (reported or self.limits.urgent) and (stop := self.limits.stop()):
                    progress.stop = stop
                    break
        self.profiling.close()
        if metrics is not None and done - 1 not in progress.losses:
            self._log(done, metrics | self.state_metrics(state), progress, state)
        updates = self.limits.updates
        if progress.stop is ALL_DONE and (updates is None or done < updates):
            progress.stop = out_of_batches(done, updates, self.limits.seconds)
        self._end(state, progress)
        return state

    def _wait(self, in_flight: deque[Any], metrics: Any) -> None:
        """Wait while too many updates are in flight: each holds a batch on the devices."""
        in_flight.append(metrics["loss"])
        if len(in_flight) > MAX_IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())

    def _profile(self, metrics: Any, progress: Progress) -> None:
        started = time.perf_counter()
        profile = self.profiling.after(metrics, self.loader.waited)
        if profile is None:
            return
        self.meter.exclude(time.perf_counter() - started)
        self.shares = {f"{name}_share": share for name, share in profile.shares.items()}
        self.on_profile(progress.update, profile)

    def _log(self, update: int, metrics: Any, progress: Progress, state: TrainState) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        check_finite(update - 1, values, skipping=state.loss_scale is not None)
        values |= self.extra_metrics(update) | self.meter.read(progress.update, self.loader.waited)
        values |= self.shares
        progress.losses[update - 1] = values["loss"]
        self.checkpointer.poll()
        self.context.metrics = values
        self.tracker.log("train", update, values)
        self.callbacks.on_log(update, values)

    def _evaluate_and_save(self, state: TrainState, progress: Progress) -> bool:
        """Evaluate and save if due, outside the measured time; return whether it evaluated."""
        update, started = progress.update, time.perf_counter()
        evaluating = self.eval_every is not None and update % self.eval_every == 0
        if evaluating:
            self._evaluate(state, progress)
        # Both are asked, so that a request does not outlast the update it was made after.
        saving = self.context.take_save() | self.checkpointer.due(update)
        if saving:
            self._save(state, progress)
        if evaluating or saving:
            self.meter.exclude(time.perf_counter() - started)
        return evaluating

    def _evaluate(self, state: TrainState, progress: Progress) -> None:
        if self.evaluate is None or progress.update in progress.eval:
            return
        values = self.evaluate(state)
        progress.eval[progress.update] = self.context.eval_metrics = values
        self.tracker.log("eval", progress.update, values)
        self.callbacks.on_eval(progress.update, values)

    def _save(self, state: TrainState, progress: Progress) -> None:
        evaluated = progress.eval.get(progress.update)
        loss = evaluated["loss"] if evaluated else None
        if self.checkpointer.save(state, progress.update, loss=loss):
            self.callbacks.on_checkpoint(progress.update)

    def _end(self, state: TrainState, progress: Progress) -> None:
        if not progress.stop.interrupted:
            self._evaluate(state, progress)
        # A run that is interrupted before its first update has nothing to save.
        if progress.update or not progress.stop.interrupted:
            self._save(state, progress)
        self.checkpointer.finish()
        self.callbacks.on_end(progress.update)


def check_finite(update: int, metrics: Metrics, *, skipping: bool) -> None:
    """Raise if the loss is not finite, unless loss scaling skips such updates."""
    if np.isfinite(metrics["loss"]) or skipping:
        return
    raise UserError(
        f"the loss is {metrics['loss']} at update {update}",
        why="it is not finite on the first batch: the model or the data has a value that is not "
        "finite"
        if update == 0
        else "training diverged",
        fix="check the data and the loss on one sample"
        if update == 0
        else "try a smaller learning rate, or clip_norm=1.0",
    )
