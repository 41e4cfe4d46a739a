"""Callbacks: user code that runs at fixed points of training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from meshwright.config.argument_checks import check_count, check_kind, clear_arguments
from meshwright.errors import UserError
from meshwright.runtime.user_code import doing
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.text.units import counted

Values = Mapping[str, float]


class CallbackContext:
    """The run that a callback belongs to; every callback has it as ``self.context``.

    Attributes:
        step: steps done.
        metrics: the metrics of the last logged step.
        eval_metrics: the metrics of the last evaluation; empty before the first.
        reason: why a callback asked to stop; empty if none did.
    """

    def __init__(self, assembled: Assembled) -> None:
        self.step = 0
        self.metrics: Mapping[str, float] = {}
        self.eval_metrics: Mapping[str, float] = {}
        self._assembled = assembled
        self._state: TrainState | None = None
        self.reason = ""
        self._save = False

    @property
    def model(self) -> Any:
        """The model after `step` steps, as the user wrote it.

        It is made when it is asked for, and holds the arrays of the run: the next step reuses
        their memory, so take a `snapshot` of what has to outlive the call.
        """
        return self._assembled.model(self.state)

    def snapshot(self) -> Any:
        """Return the model with arrays of its own, sharded like the run's, which stay alive."""
        return self._assembled.snapshot(self.state)

    @property
    def state(self) -> TrainState:
        """The training state after `step` steps, whose arrays the next step reuses."""
        if self._state is None:
            raise RuntimeError("the model can be read during training only")
        return self._state

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the last logged step; None if it cannot be found."""
        return self.metrics.get("learning_rate")

    def stop(self, reason: str) -> None:
        """Stop training after this step; one process that asks stops all."""
        self.reason = reason

    def save(self) -> None:
        """Save a checkpoint after this step; every process must ask for it."""
        self._save = True

    def at(self, step: int, state: TrainState) -> None:
        """Set where the run is; the training loop calls it."""
        self.step, self._state = step, state

    def take_save(self) -> bool:
        """Return whether a callback asked to save since the last call."""
        asked, self._save = self._save, False
        return asked


class Callback:
    """Base class of callbacks; a subclass overrides the methods it needs.

    Every process calls the same methods with the same numbers. `should_stop` is called after
    every logged step and every evaluation; one reason to stop stops all processes.

    Attributes:
        context: the run: its model, metrics and learning rate, and `stop` and `save`. It is set
            before the first method is called.
    """

    context: CallbackContext

    def on_start(self, step: int) -> None:
        """Called before training, with the steps already done (more than 0 after a resume)."""

    def on_recall(self, step: int, values: Values) -> None:
        """Called for every evaluation from before the checkpoint the run resumes from."""

    def on_log(self, step: int, values: Values) -> None:
        """Called with the training metrics of a logged step."""

    def on_eval(self, step: int, values: Values) -> None:
        """Called with the metrics of an evaluation."""

    def on_checkpoint(self, step: int) -> None:
        """Called when a checkpoint is being written."""

    def on_end(self, step: int) -> None:
        """Called after training."""

    def should_stop(self) -> str:
        """Return the reason to stop training; empty to continue."""
        return ""


class EarlyStopping(Callback):
    """Stops training when an evaluation metric no longer improves.

    Args:
        patience: evaluations without improvement before training stops.
        min_delta: how much better a value must be to count as an improvement.
        metric: the evaluation metric to watch.
        mode: whether lower ("min") or higher ("max") is better; by default higher for a metric
            with "accuracy" in its name, and lower for any other.
    """

    @clear_arguments("mw.EarlyStopping")
    def __init__(
        self,
        patience: int,
        *,
        min_delta: float = 0.0,
        metric: str = "loss",
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        check_count("patience", patience)
        check_kind("min_delta", min_delta, (int, float), "write a number, such as min_delta=0.01")
        check_kind("metric", metric, str, 'write the name of a metric, such as "loss"')
        if mode not in ("min", "max", None):
            raise UserError(f"mode={mode!r} is not known", fix='write mode="min" or mode="max"')
        self._patience, self._min_delta, self.metric = patience, min_delta, metric
        lower = metric.lower()
        grows = lower.startswith("reward") or "accuracy" in lower
        self._sign = -1.0 if (mode == "max" if mode else grows) else 1.0
        self._best = math.inf
        self._bad_evaluations = 0

    def on_eval(self, step: int, values: Values) -> None:
        """Compare with the best value so far; one that is not finite does not count as better."""
        value = self._sign * values[self.metric]
        if value < self._best - self._min_delta:
            self._best, self._bad_evaluations = value, 0
        else:
            self._bad_evaluations += 1

    def on_recall(self, step: int, values: Values) -> None:
        """Count it like any other, so that a resumed run stops when an unbroken one would."""
        if self.metric in values:
            self.on_eval(step, values)

    def should_stop(self) -> str:
        """Return the reason to stop training; empty to continue."""
        if self._bad_evaluations < self._patience:
            return ""
        margin = f"more than {self._min_delta:g} " if self._min_delta else ""
        side = "below" if self._sign > 0 else "above"
        return (
            f"{counted(self._bad_evaluations, 'evaluation')} in which {self.metric} was not "
            f"{margin}{side} {self._sign * self._best:.4f}, the best so far"
        )


class OnMetrics(Callback):
    """Calls a function with the number of a step, from 1, and its training metrics."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def on_log(self, step: int, values: Values) -> None:
        """Call the function."""
        self._function(step, dict(values))


class Callbacks:
    """The callbacks of a run; an exception in one of them carries a note with its name."""

    def __init__(self, callbacks: Sequence[Callback], context: CallbackContext) -> None:
        self._all, self._context = tuple(callbacks), context
        for callback in self._all:
            callback.context = context

    def should_stop(self) -> str:
        """Return the first reason to stop; empty to continue."""
        return self._context.reason or next(filter(None, self.call("should_stop")), "")

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each callback, such as ``on_log``, and return what they return."""
        results: list[Any] = []
        for callback in self._all:
            with doing(f"calling {type(callback).__name__}.{method}"):
                results.append(getattr(callback, method)(*args))
        return results
