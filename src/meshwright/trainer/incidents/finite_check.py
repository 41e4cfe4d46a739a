"""The finite check: finds the update at which the loss, a gradient or the state is not finite."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import jax

from meshwright.errors import NotFinite
from meshwright.step.train_step import HALTED
from meshwright.trainer.incidents.not_finite import (
    BadUpdate,
    UpdateValues,
    bad_update_error,
    smaller_updates,
)

MAX_IN_FLIGHT = 2
"""Updates dispatched to the devices before the loop waits for the first of them."""
KEPT_UPDATES = 50
"""Updates whose loss and gradient norm are remembered, for the record of an incident."""


class FiniteCheck:
    """Looks at the loss and the gradient norm of every update, a few updates late.

    A guarded step changes nothing from the first update on that is not finite, so that being late
    does no harm: `BadUpdate` names that update. A step without a guard leaves a gradient that is
    not finite to the optimizer; if the loss or the state follows, the divergence began there. With
    loss scaling such updates are skipped on the devices.

    Attributes:
        history: the values of the latest updates.
    """

    def __init__(self) -> None:
        self.history: deque[UpdateValues] = deque(maxlen=KEPT_UPDATES)
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._began: tuple[int, float] | None = None

    def add(self, update: int, metrics: Any) -> None:
        """Add a dispatched update, and wait for an earlier one if too many are in flight.

        Each update in flight holds a batch on the devices.
        """
        self._in_flight.append((update, metrics))
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._look(*self._in_flight.popleft())

    def look(self, until: int) -> None:
        """Wait for the updates up to this one; raise if one of them is not finite."""
        while self._in_flight and self._in_flight[0][0] <= until:
            self._look(*self._in_flight.popleft())

    def forget(self) -> None:
        """Forget the updates in flight, which changed nothing."""
        self._in_flight.clear()

    def state_error(self, update: int) -> NotFinite:
        """Return the error for a state that is not finite after an update."""
        try:
            self.look(update)
        except NotFinite as error:
            return error
        began, norm = self._began or (update, math.nan)
        return NotFinite(
            f"the state is not finite after update {began}, and was not saved",
            why="training diverged: "
            + (
                f"the gradient norm is {norm}"
                if self._began
                else "the loss and the gradient are finite, what the optimizer made of them is not"
            ),
            fix=smaller_updates(),
        )

    def _look(self, update: int, metrics: Any) -> None:
        names = ("loss", "grad_norm", "loss_scale", HALTED)
        read = jax.device_get({name: metrics[name] for name in names if name in metrics})
        values = UpdateValues(update, float(read["loss"]), float(read["grad_norm"]))
        self.history.append(values)
        if HALTED in read:
            if read[HALTED]:
                raise BadUpdate(values, read["loss"])
            return
        if "loss_scale" in read:
            return
        if not math.isfinite(values.loss):
            raise bad_update_error(values, began=self._began)
        if math.isfinite(values.grad_norm):
            self._began = None
        else:
            self._began = self._began or (update, values.grad_norm)
