"""Warnings when a training ends otherwise than its call reads."""

from __future__ import annotations

import warnings

from meshwright.data.protocols import Data
from meshwright.trainer.ending.stop import StopReason
from meshwright.trainer.trained.fit_result import FitResult

_USER = 4
"""How far the caller of `fit` is from the functions that warn."""


def warn_of_end(
    result: FitResult, done: int, steps: int | None, data: Data, batch_size: int
) -> None:
    """Warn if batches ran out, nothing was trained, or samples were left out.

    Args:
        result: the result of the training.
        done: updates that it did.
        steps: updates that were asked for; None for another kind of duration.
        data: what was trained on.
        batch_size: samples per global batch.
    """
    if result.stop.reason is StopReason.OUT_OF_BATCHES:
        _warn_ran_out(result.stop.text)
    elif steps != 0 and not done:
        _warn_nothing_done(result.updates, steps or result.updates)
    if dropped := data.num_dropped:
        _warn_dropped(dropped, batch_size)


def _warn_nothing_done(done: int, asked: int) -> None:
    warnings.warn(
        f"this trainer had already done {done} updates, and nothing was trained. The length of a "
        f"training counts from its first update: write steps={done + asked} to do {asked} more, or "
        "restart=True to begin anew",
        UserWarning,
        stacklevel=_USER,
    )


def _warn_dropped(count: int, size: int) -> None:
    warnings.warn(
        f"the last batch of the data has {count} samples instead of {size}, and was not trained "
        "on. Give the samples instead of batches, or a batch size that divides their number, to "
        "use them all",
        UserWarning,
        stacklevel=_USER,
    )


def _warn_ran_out(text: str) -> None:
    warnings.warn(
        f"{text}, and training stopped there. Give more batches, or write epochs=… for data that "
        "can be read again",
        UserWarning,
        stacklevel=_USER,
    )
