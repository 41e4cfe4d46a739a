"""The loop: batches in, updates done, metrics told, states kept."""

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
from meshwright.trainer.callbacks import Callback
from meshwright.trainer.compiled import Run
from meshwright.trainer.feed import Feed
from meshwright.trainer.keeper import Keeper
from meshwright.trainer.limits import Limits
from meshwright.trainer.meter import Meter

AHEAD = 2
"""Updates handed to the devices before the first of them is waited for."""

ENOUGH, RAN_OUT = "all updates are done", "the batches ran out"

Metrics = dict[str, float]


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        update: updates done.
        losses: the mean loss of every logged update, by its number from 0.
        eval: the metrics of every evaluation, by updates done.
        stopped: why the run ended.
        interrupted: whether a signal ended it.
    """

    update: int = 0
    losses: dict[int, float] = field(default_factory=dict[int, float])
    eval: dict[int, Metrics] = field(default_factory=dict[int, Metrics])
    stopped: str = ENOUGH
    interrupted: bool = False


@dataclass(kw_only=True)
class Loop:
    """Everything a run needs; what is off is a null object.

    Attributes:
        run: the compiled step.
        feed: batches on the devices.
        limits: when it ends.
        meter: how fast it goes.
        tracker: who is told.
        callbacks: the user's own code.
        keeper: who saves states.
        profiling: who finds out where the time goes.
        on_profile: is told of it, and after how many updates.
        evaluate: from a state to its metrics on held-out data; None for no evaluation.
        eval_every: updates between two evaluations; None for one at the end.
        log_every: updates between two looks at the metrics.
        extra: further values for the metrics of an update, such as its learning rate.
        shares: what the time of an update goes to, once it was profiled.
    """

    run: Run
    feed: Feed
    limits: Limits
    meter: Meter
    tracker: Tracker
    callbacks: Callback
    keeper: Keeper
    profiling: NoProfiling
    on_profile: Callable[[int, Profile], None]
    evaluate: Callable[[TrainState], Metrics] | None
    eval_every: int | None
    log_every: int
    extra: Callable[[int], Metrics]
    shares: Metrics = field(default_factory=dict[str, float])

    def train(self, state: TrainState, progress: Progress) -> TrainState:
        """Train from ``progress.update`` on until a limit is reached; returns the last state."""
        self.callbacks.on_start(progress.update)
        seen: tuple[int, Any] | None = None
        in_flight: deque[Any] = deque()
        first, done, metrics = progress.update + 1, progress.update, None
        last = self.limits.updates
        # A run that goes on may have had its reason to stop already.
        if done and (stop := self.limits.stop()):
            progress.stopped, progress.interrupted, last = stop.reason, stop.interrupted, done
        with self.feed.open(done, last) as batches:
            self.meter.restart(done, self.feed.waited)
            for batch in batches:
                state, metrics = self.run(state, batch)
                done = progress.update = done + 1
                self._wait(in_flight, metrics)
                self._profile(metrics, progress)
                looked = seen is not None
                if seen is not None:
                    # One update late, so that the devices always have the next one.
                    self._log(*seen, progress, state)
                    seen = None
                if done == first:
                    # At once, and apart: its time holds what is done once, such as filling caches.
                    self._log(done, metrics, progress, state)
                elif done % self.log_every == 0:
                    seen = (done, metrics)
                looked |= self._pause(state, progress)
                if (looked or self.limits.urgent) and (stop := self.limits.stop()):
                    progress.stopped, progress.interrupted = stop.reason, stop.interrupted
                    break
        self.profiling.close()
        if metrics is not None and done - 1 not in progress.losses:
            self._log(done, metrics, progress, state)
        if self.limits.updates is not None and done < self.limits.updates:
            progress.stopped = progress.stopped if progress.stopped != ENOUGH else RAN_OUT
        self._end(state, progress)
        return state

    def _wait(self, in_flight: deque[Any], metrics: Any) -> None:
        """Hold back while too many updates are in flight: each keeps its batch on the devices."""
        in_flight.append(metrics["loss"])
        if len(in_flight) > AHEAD:
            jax.block_until_ready(in_flight.popleft())

    def _profile(self, metrics: Any, progress: Progress) -> None:
        started = time.perf_counter()
        profile = self.profiling.after(metrics, self.feed.waited)
        if profile is None:
            return
        self.meter.leave_out(time.perf_counter() - started)
        self.shares = {f"{name}_share": share for name, share in profile.shares.items()}
        self.on_profile(progress.update, profile)

    def _log(self, update: int, metrics: Any, progress: Progress, state: TrainState) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        check_finite(update - 1, values, skipping=state.loss_scale is not None)
        values |= self.extra(update) | self.meter.read(progress.update, self.feed.waited)
        values |= self.shares
        progress.losses[update - 1] = values["loss"]
        self.keeper.poll()
        self.tracker.log("train", update, values)
        self.callbacks.on_log(update, values)

    def _pause(self, state: TrainState, progress: Progress) -> bool:
        """Evaluate and save where it is time, uncounted by the meter; say whether it evaluated."""
        update, started = progress.update, time.perf_counter()
        evaluating = self.eval_every is not None and update % self.eval_every == 0
        saving = self.keeper.due(update)
        if evaluating:
            self._evaluate(state, progress)
        if saving:
            self._save(state, progress)
        if evaluating or saving:
            self.meter.leave_out(time.perf_counter() - started)
        return evaluating

    def _evaluate(self, state: TrainState, progress: Progress) -> None:
        if self.evaluate is None or progress.update in progress.eval:
            return
        values = self.evaluate(state)
        progress.eval[progress.update] = values
        self.tracker.log("eval", progress.update, values)
        self.callbacks.on_eval(progress.update, values)

    def _save(self, state: TrainState, progress: Progress) -> None:
        found = progress.eval.get(progress.update)
        if self.keeper.save(state, progress.update, loss=found["loss"] if found else None):
            self.callbacks.on_checkpoint(progress.update)

    def _end(self, state: TrainState, progress: Progress) -> None:
        if not progress.interrupted:
            self._evaluate(state, progress)
        self._save(state, progress)
        self.keeper.finish()
        self.callbacks.on_end(progress.update)


def check_finite(step: int, metrics: Metrics, *, skipping: bool) -> None:
    """Refuse to go on with a loss that is not finite, unless such updates are skipped."""
    if np.isfinite(metrics["loss"]) or skipping:
        return
    raise UserError(
        f"the loss is {metrics['loss']} at update {step}",
        why="the first batch already gives it: the model or the data holds a value that is not "
        "finite"
        if step == 0
        else "training diverged",
        fix="check the data and the loss on one sample"
        if step == 0
        else "try a smaller learning rate, or clip_norm=1.0",
    )
