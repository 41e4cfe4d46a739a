"""The finite check: finds the update at which the loss, a gradient or the state is not finite."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import jax

from meshwright.errors import UserError

MAX_IN_FLIGHT = 2
"""Updates dispatched to the devices before the loop waits for the first of them."""


class FiniteCheck:
    """Looks at the loss and the gradient norm of every update, a few updates late.

    A gradient that is not finite is no error by itself, because an optimizer may handle it; if the
    loss or the state follows, the divergence began there. With loss scaling such updates are
    skipped, and nothing is looked at.
    """

    def __init__(self) -> None:
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
        """Wait for the updates up to this one; raise if a loss is not finite."""
        while self._in_flight and self._in_flight[0][0] <= until:
            self._look(*self._in_flight.popleft())

    def state_error(self, update: int) -> UserError:
        """Return the error for a state that is not finite after an update."""
        try:
            self.look(update)
        except UserError as error:
            return error
        began, norm = self._began or (update, math.nan)
        return UserError(
            f"the state is not finite after update {began}, and was not saved",
            why="training diverged: "
            + (
                f"the gradient norm is {norm}"
                if self._began
                else "the loss and the gradient are finite, what the optimizer made of them is not"
            ),
            fix=_FIX,
        )

    def _look(self, update: int, metrics: Any) -> None:
        if "loss_scale" in metrics:
            jax.block_until_ready(metrics["loss"])
            return
        values = jax.device_get({name: metrics[name] for name in ("loss", "grad_norm")})
        loss, norm = float(values["loss"]), float(values["grad_norm"])
        if not math.isfinite(loss):
            raise self._loss_error(update, loss)
        if math.isfinite(norm):
            self._began = None
        else:
            self._began = self._began or (update, norm)

    def _loss_error(self, update: int, loss: float) -> UserError:
        if update == 1:
            return UserError(
                f"the loss is {loss} at update {update}",
                why="it is not finite on the first batch: the model or the data has a value that "
                "is not finite",
                fix="check the data and the loss on one sample",
            )
        why = "training diverged"
        if self._began is not None:
            began, norm = self._began
            why += f": at update {began} the loss was finite, and the gradient norm {norm}"
        return UserError(f"the loss is {loss} at update {update}", why=why, fix=_FIX)


_FIX = "try a smaller learning rate, or clip_norm=1.0"
