"""Steps that are not finite: finding them, what a run does about them, and the errors."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshwright.config.argument_checks import check_count
from meshwright.config.base import shorten
from meshwright.config.schema import OnNonfinite
from meshwright.errors import NotFinite, Setting, UserError
from meshwright.program.trace.traced_loss import BatchLeaf
from meshwright.step.train_step import HALTED
from meshwright.text.units import counted

MAX_IN_FLIGHT = 2
"""Steps dispatched to the devices before the loop waits for the first of them."""
KEPT_STEPS = 50
"""Steps whose loss and gradient norm are remembered, for the record of an incident."""


def smaller_steps() -> str:
    """Return what to try when training diverges."""
    return f"try a smaller learning rate, or {Setting('optimizer.clip_norm', 1.0)}"


def parameters_fail() -> str:
    """Return what to do where no batch would be finite any more."""
    return (
        "the parameters are the cause: go back to a checkpoint with "
        f"{Setting('training.on_nonfinite', 'rewind')}, and {smaller_steps()}"
    )


def check_policy(action: Any, max_skipped: Any, max_rewinds: Any) -> None:
    """Check what a trainer is to do about steps that are not finite."""
    known = get_args(OnNonfinite)
    if not isinstance(action, str) or action not in known:
        raise UserError(
            f"on_nonfinite={shorten(repr(action))} is not valid",
            why="it says what to do about a step whose loss or gradient is not finite",
            fix=f"write on_nonfinite={' or '.join(repr(name) for name in known)}",
        )
    check_count("max_skipped", max_skipped)
    check_count("max_rewinds", max_rewinds)


@dataclass(frozen=True)
class StepValues:
    """Loss and gradient norm of a step, numbered from 1; the same in every process."""

    step: int
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss} at step {self.step}"
        return f"the gradient is not finite at step {self.step}"


class BadStep(Exception):
    """A step was not finite, and changed nothing; nor did those after it."""

    def __init__(self, values: StepValues, loss: Any) -> None:
        self.values, self.loss = values, loss
        super().__init__(str(values))


def bad_step_error(
    values: StepValues,
    *,
    began: tuple[int, float] | None = None,
    batch: str = "",
    limit: str = "",
    fix: str = "",
    indices: str = "",
    numbers: str = "",
) -> NotFinite:
    """Return the error that ends a run.

    ``began`` are the step and the norm with which it began, if that was an earlier one, and
    ``limit`` is why the run does not continue without it. ``indices`` and ``numbers`` are what is
    wrong with those of the batch.
    """
    if numbers:
        why, fix = numbers, fix or "correct the data"
    elif indices:
        why, fix = indices, "correct the data, or give the model that many classes or rows"
    elif not math.isfinite(values.loss) and values.step == 1:
        why = "it is not finite on the first batch: the model or the data has a value that is not"
        why += " finite"
        fix = fix or "check the data and the loss on one sample"
    elif math.isfinite(values.loss):
        why = f"the loss is {values.loss:g}, and the gradient norm {values.grad_norm}"
    elif began is not None:
        why = f"training diverged: at step {began[0]} the loss was finite, and the gradient norm "
        why += str(began[1])
    else:
        why = "training diverged, or the batch has a value that is not finite"
    return NotFinite(
        str(values), why="; ".join(filter(None, (why, batch, limit))), fix=fix or smaller_steps()
    )


def wrong_numbers(described: Sequence[BatchLeaf], batch: Sequence[Any]) -> str:
    """Say which arrays of a batch are not finite; empty if all are."""
    found: list[str] = []
    for leaf, array in zip(described, batch, strict=True):
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        if floats and (counts := tell_wrong(*count_wrong(np.asarray(array)))):
            found.append(f"the batch is not finite itself: `{leaf.path}` has {counts}")
    return "; ".join(found)


def count_wrong(array: NDArray[Any]) -> tuple[int, int]:
    """Return how many numbers are NaN, and how many are infinite, in float32."""
    values = array.astype(np.float32)
    return int(np.isnan(values).sum()), int(np.isinf(values).sum())


def tell_wrong(nans: int, infs: int) -> str:
    """Say how many numbers are not finite; empty if all are."""
    parts = [f"{nans} NaN"] * bool(nans) + [counted(infs, "infinity", "infinities")] * bool(infs)
    return " and ".join(parts)


class FiniteCheck:
    """Looks at the loss and the gradient norm of every step, a few steps late.

    If steps are guarded, nothing changes from the first one on that is not finite, so that being
    late does no harm: `BadStep` names it. Without a guard, a gradient that is not finite is left to
    the optimizer; if the loss or the state follows, the divergence began there. With loss scaling
    such steps are skipped on the devices.
    """

    def __init__(self) -> None:
        self.history: deque[StepValues] = deque(maxlen=KEPT_STEPS)
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._began: tuple[int, float] | None = None

    def add(self, step: int, metrics: Any) -> None:
        """Add a dispatched step, and wait for an earlier one if too many are in flight.

        Each step in flight holds a batch on the devices.
        """
        self._in_flight.append((step, metrics))
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._look(*self._in_flight.popleft())

    def look(self, until: int) -> None:
        """Wait for the steps up to this one; raise if one of them is not finite."""
        while self._in_flight and self._in_flight[0][0] <= until:
            self._look(*self._in_flight.popleft())

    def forget(self) -> None:
        """Forget the steps in flight, which changed nothing."""
        self._in_flight.clear()

    def state_error(self, step: int) -> NotFinite:
        """Return the error for a state that is not finite after a step."""
        try:
            self.look(step)
        except NotFinite as error:
            return error
        began, norm = self._began or (step, math.nan)
        return NotFinite(
            f"the state is not finite after step {began}, and was not saved",
            why="training diverged: "
            + (
                f"the gradient norm is {norm}"
                if self._began
                else "the loss and the gradient are finite, what the optimizer made of them is not"
            ),
            fix=smaller_steps(),
        )

    def _look(self, step: int, metrics: Any) -> None:
        names = ("loss", "grad_norm", "loss_scale", HALTED)
        read = jax.device_get({name: metrics[name] for name in names if name in metrics})
        values = StepValues(step, float(read["loss"]), float(read["grad_norm"]))
        self.history.append(values)
        if HALTED in read:
            if read[HALTED]:
                raise BadStep(values, read["loss"])
            return
        if "loss_scale" in read:
            return
        if not math.isfinite(values.loss):
            raise bad_step_error(values, began=self._began)
        if math.isfinite(values.grad_norm):
            self._began = None
        else:
            self._began = self._began or (step, values.grad_norm)
