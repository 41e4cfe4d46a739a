"""Why a run stops: a typed reason, and its text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StopReason(Enum):
    """Why a run stopped."""

    ALL_UPDATES = "all updates"
    OUT_OF_BATCHES = "out of batches"
    OUT_OF_TIME = "out of time"
    CALLBACK = "callback"
    SIGNAL = "signal"
    RESTORED = "restored"


@dataclass(frozen=True)
class Stop:
    """Why a run stops.

    Attributes:
        reason: the kind of reason.
        text: the reason for people.
    """

    reason: StopReason
    text: str

    @property
    def interrupted(self) -> bool:
        """Whether a signal stops it; then only the state is saved."""
        return self.reason is StopReason.SIGNAL


ALL_DONE = Stop(StopReason.ALL_UPDATES, "all updates are done")
NONE_ASKED = Stop(StopReason.ALL_UPDATES, "no updates were asked for")


def out_of_batches(done: int, updates: int | None, seconds: float | None) -> Stop:
    """Return the stop of a run whose data ended before its last update or its time limit."""
    if updates is not None:
        text = f"the batches ran out after {done} of {updates} updates"
    elif seconds is not None:
        text = f"the batches ran out after {done} updates, before {seconds:g} s had passed"
    else:
        text = f"the batches ran out after {done} updates"
    return Stop(StopReason.OUT_OF_BATCHES, text)
