"""Updates that are not finite: finding them, what a run does about them, and the errors."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, get_args

import jax

from meshwright.config.argument_checks import check_count
from meshwright.config.base import shorten
from meshwright.config.schema import OnNonfinite
from meshwright.errors import NotFinite, Setting, UserError
from meshwright.step.train_step import HALTED

MAX_IN_FLIGHT = 2
"""Updates dispatched to the devices before the loop waits for the first of them."""
KEPT_UPDATES = 50
"""Updates whose loss and gradient norm are remembered, for the record of an incident."""


def smaller_updates() -> str:
    """Return what to try when training diverges."""
    return f"try a smaller learning rate, or {Setting('optimizer.clip_norm', 1.0)}"


def parameters_fail() -> str:
    """Return what to do where no batch would be finite any more."""
    return (
        "the parameters are the cause: go back to a checkpoint with "
        f"{Setting('training.on_nonfinite', 'rewind')}, and {smaller_updates()}"
    )


def check_policy(action: Any, max_skipped: Any, max_rewinds: Any) -> None:
    """Check what a trainer is to do about updates that are not finite."""
    known = get_args(OnNonfinite)
    if not isinstance(action, str) or action not in known:
        raise UserError(
            f"on_nonfinite={shorten(repr(action))} is not valid",
            why="it says what to do about an update whose loss or gradient is not finite",
            fix=f"write on_nonfinite={' or '.join(repr(name) for name in known)}",
        )
    check_count("max_skipped", max_skipped)
    check_count("max_rewinds", max_rewinds)


@dataclass(frozen=True)
class UpdateValues:
    """The values of one update, the same in every process.

    Attributes:
        update: its number, from 1.
        loss: the loss of the whole batch.
        grad_norm: the norm of the whole gradient.
    """

    update: int
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss} at update {self.update}"
        return f"the gradient is not finite at update {self.update}"


class BadUpdate(Exception):
    """An update was not finite, and changed nothing; nor did those after it.

    Attributes:
        values: its loss and gradient norm.
        loss: the loss as the device has it.
    """

    def __init__(self, values: UpdateValues, loss: Any) -> None:
        self.values, self.loss = values, loss
        super().__init__(str(values))


def bad_update_error(
    values: UpdateValues,
    *,
    began: tuple[int, float] | None = None,
    batch: str = "",
    limit: str = "",
    fix: str = "",
) -> NotFinite:
    """Return the error that ends a run.

    Args:
        values: the update.
        began: the update and the norm with which it began, if that was an earlier one.
        batch: which batch it was.
        limit: why the run does not continue without it.
        fix: what to do next; smaller updates by default.
    """
    if not math.isfinite(values.loss) and values.update == 1:
        why = "it is not finite on the first batch: the model or the data has a value that is not"
        why += " finite"
        fix = fix or "check the data and the loss on one sample"
    elif math.isfinite(values.loss):
        why = f"the loss is {values.loss:g}, and the gradient norm {values.grad_norm}"
    elif began is not None:
        why = f"training diverged: at update {began[0]} the loss was finite, and the gradient norm "
        why += str(began[1])
    else:
        why = "training diverged, or the batch has a value that is not finite"
    return NotFinite(
        str(values), why="; ".join(filter(None, (why, batch, limit))), fix=fix or smaller_updates()
    )


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
