"""What a callback can read of a run, and what it can ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState


class CallbackContext:
    """The run that a callback belongs to; every callback has it as ``self.context``.

    Attributes:
        update: updates done.
        metrics: the metrics of the last logged update.
        eval_metrics: the metrics of the last evaluation; empty before the first.
    """

    def __init__(self, assembled: Assembled) -> None:
        self.update = 0
        self.metrics: Mapping[str, float] = {}
        self.eval_metrics: Mapping[str, float] = {}
        self._assembled = assembled
        self._state: TrainState | None = None
        self._reason = ""
        self._save = False

    @property
    def model(self) -> Any:
        """The model after `update` updates, as the user wrote it.

        It is made when it is asked for, and holds the arrays of the run: the next update reuses
        their memory, so copy what has to outlive the call.
        """
        if self._state is None:
            raise RuntimeError("the model can be read during training only")
        return self._assembled.model(self._state)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the last logged update; None if it cannot be found."""
        return self.metrics.get("learning_rate")

    def stop(self, reason: str) -> None:
        """Stop training after this update; one process that asks stops all."""
        self._reason = reason

    def save(self) -> None:
        """Save a checkpoint after this update; every process must ask for it."""
        self._save = True

    def at(self, update: int, state: TrainState) -> None:
        """Set where the run is; the training loop calls it."""
        self.update, self._state = update, state

    def stop_reason(self) -> str:
        """Return why a callback asked to stop; empty if none did."""
        return self._reason

    def take_save(self) -> bool:
        """Return whether a callback asked to save since the last call."""
        asked, self._save = self._save, False
        return asked
