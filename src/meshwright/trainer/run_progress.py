"""The progress of a run, and why it stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

Metrics = dict[str, float]


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


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        update: updates done.
        losses: the mean loss of every logged update, by its number from 1.
        eval: the metrics of every evaluation, by updates done.
        stop: why the run ended.
        skipped: updates among those done that were skipped, because they were not finite.
        left_out: batches left out when the run went back, as the first and the last of each.
    """

    update: int = 0
    losses: dict[int, float] = field(default_factory=dict[int, float])
    eval: dict[int, Metrics] = field(default_factory=dict[int, Metrics])
    stop: Stop = ALL_DONE
    skipped: int = 0
    left_out: list[list[int]] = field(default_factory=list[list[int]])

    def near(self) -> str:
        """Say what the run is doing; devices may be an update or two behind."""
        return f"training, near update {max(self.update, 1)}"

    def go_back(self, update: int, skipped: int) -> None:
        """Forget what came after an update."""
        self.update, self.skipped = update, skipped
        for values in (self.losses, self.eval):
            for later in [each for each in values if each > update]:
                del values[later]
