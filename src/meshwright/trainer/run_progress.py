"""The progress of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.trainer.ending.stop import ALL_DONE, Stop

Metrics = dict[str, float]


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
