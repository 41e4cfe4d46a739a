"""Callbacks: code of the user's that runs at fixed points of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Values = Mapping[str, float]


class Callback:
    """Does nothing; a subclass overrides what it wants to know.

    Every process calls the same methods with the same numbers. What `should_stop` answers is
    asked after every look at the metrics and every evaluation; one yes stops all processes.
    """

    def on_start(self, update: int) -> None:
        """Be told that training begins after so many updates (0, or more when resumed)."""

    def on_recall(self, update: int, values: Values) -> None:
        """Be told of an evaluation from before the checkpoint that the run goes on from."""

    def on_log(self, update: int, values: Values) -> None:
        """Be told the training metrics."""

    def on_eval(self, update: int, values: Values) -> None:
        """Be told the metrics of an evaluation."""

    def on_checkpoint(self, update: int) -> None:
        """Be told that a checkpoint is being written."""

    def on_end(self, update: int) -> None:
        """Be told that training has ended."""

    def should_stop(self) -> str:
        """Return why training should stop; empty to go on."""
        return ""


class EarlyStopping(Callback):
    """Stops when the evaluation loss has not become better for a while.

    Args:
        patience: evaluations without a better loss before it stops.
        min_delta: by how much a loss must be lower to be better.
        metric: which metric of the evaluation to watch; lower is better.
    """

    def __init__(self, patience: int, *, min_delta: float = 0.0, metric: str = "loss") -> None:
        self._patience, self._min_delta, self._metric = patience, min_delta, metric
        self._best = math.inf
        self._since = 0

    def on_eval(self, update: int, values: Values) -> None:
        """Compare with the best so far; a loss that is not finite is never better."""
        value = values[self._metric]
        if value < self._best - self._min_delta:
            self._best, self._since = value, 0
        else:
            self._since += 1

    def on_recall(self, update: int, values: Values) -> None:
        """Count it like the others, so that a resumed run stops when the whole one would have."""
        if self._metric in values:
            self.on_eval(update, values)

    def should_stop(self) -> str:
        """Return why training should stop; empty to go on."""
        if self._since < self._patience:
            return ""
        return (
            f"{self._since} evaluations without a {self._metric} below {self._best:.4f}, "
            "the best so far"
        )


class OnMetrics(Callback):
    """Hands training metrics to a function of the update's number (from 0) and its metrics."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def on_log(self, update: int, values: Values) -> None:
        """Call the function."""
        self._function(update - 1, dict(values))


class Callbacks(Callback):
    """Several callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._all = tuple(callbacks)

    def on_start(self, update: int) -> None:
        """Tell each."""
        for callback in self._all:
            callback.on_start(update)

    def on_recall(self, update: int, values: Values) -> None:
        """Tell each."""
        for callback in self._all:
            callback.on_recall(update, values)

    def on_log(self, update: int, values: Values) -> None:
        """Tell each."""
        for callback in self._all:
            callback.on_log(update, values)

    def on_eval(self, update: int, values: Values) -> None:
        """Tell each."""
        for callback in self._all:
            callback.on_eval(update, values)

    def on_checkpoint(self, update: int) -> None:
        """Tell each."""
        for callback in self._all:
            callback.on_checkpoint(update)

    def on_end(self, update: int) -> None:
        """Tell each."""
        for callback in self._all:
            callback.on_end(update)

    def should_stop(self) -> str:
        """Return the first reason to stop."""
        return next((reason for c in self._all if (reason := c.should_stop())), "")
