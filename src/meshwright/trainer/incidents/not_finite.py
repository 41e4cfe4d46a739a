"""Updates that are not finite: what is done about them, and how they are told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from meshwright.config.argument_checks import check_count
from meshwright.config.base import shorten
from meshwright.config.schema import OnNonfinite
from meshwright.errors import NotFinite, Setting, UserError


def smaller_updates() -> str:
    """Return what to try when training diverges."""
    return f"try a smaller learning rate, or {Setting('optimizer.clip_norm', 1.0)}"


def parameters_fail() -> str:
    """Return what to do where no batch would be finite any more."""
    return (
        "the parameters are the cause: go back to a checkpoint with "
        f"{Setting('training.on_nonfinite', 'rewind')}, and {smaller_updates()}"
    )


@dataclass(frozen=True)
class NonfinitePolicy:
    """What a run does about an update whose loss or gradient is not finite.

    Attributes:
        action: stop, skip, rewind or apply.
        max_skipped: consecutive updates to skip before the run stops.
        max_rewinds: how often the run goes back before it stops.
    """

    action: OnNonfinite = "stop"
    max_skipped: int = 10
    max_rewinds: int = 3

    @property
    def guarded(self) -> bool:
        """Whether such an update changes nothing."""
        return self.action != "apply"


def check_policy(action: Any, max_skipped: Any, max_rewinds: Any) -> NonfinitePolicy:
    """Return the policy that a trainer is given."""
    known = get_args(OnNonfinite)
    if not isinstance(action, str) or action not in known:
        raise UserError(
            f"on_nonfinite={shorten(repr(action))} is not valid",
            why="it says what to do about an update whose loss or gradient is not finite",
            fix=f"write on_nonfinite={' or '.join(repr(name) for name in known)}",
        )
    check_count("max_skipped", max_skipped)
    check_count("max_rewinds", max_rewinds)
    return NonfinitePolicy(action, max_skipped, max_rewinds)  # pyright: ignore[reportArgumentType]


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
        limit: why the run does not go on without it.
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
