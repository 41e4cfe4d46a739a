"""What data are: batches by step, and sources of samples by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError

HostBatch = dict[str, NDArray[Any]]
Rows = NDArray[np.int64]
"""Row numbers within a global batch: those that one process needs."""


class OutOfData(Exception):
    """There is no batch for this step, in any process."""


class Data(ABC):
    """Where the batches of a run come from.

    Only `batch`, `fingerprint` and `describe` have to be defined. The rest has defaults that hold
    for data with a batch of any size for every step.

    Attributes:
        any_batch_size: whether batches of any size can be read; otherwise the data bring theirs.
        forward_only: whether batches can only be read in order, and reading continues where it was.
        read_ahead: whether batches can be read before the steps before them are done.
        samples: whether the data are read as samples, in order, which are stacked into batches.
        order: what to say about the order of a resumed run; empty if it is always the same.
        eval_batches: batches of an evaluation if the user names no number; None for all.
    """

    any_batch_size: ClassVar[bool] = True
    forward_only: ClassVar[bool] = False
    read_ahead: ClassVar[bool] = True
    samples: bool = False
    order: str = ""
    eval_batches: ClassVar[int | None] = None

    @abstractmethod
    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> Any:
        """Return the global batch of one step, or only these rows of it.

        It is a function of the seed and the step alone.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short text that changes when the samples or their numbering do."""

    @abstractmethod
    def describe(self) -> str:
        """Return a description in one line."""

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None if the data are endless or their size is unknown."""
        return None

    @property
    def num_dropped(self) -> int:
        """Samples of a short last batch that are not trained on."""
        return 0

    @property
    def endless(self) -> bool:
        """Whether reading every sample might never end."""
        return self.num_samples is None

    @property
    def has_every_batch(self) -> bool:
        """Whether there is certainly a batch for every step, so that no process runs out first."""
        return self.num_samples is not None

    @property
    def may_end(self) -> bool:
        """Whether reading may raise `OutOfData` or StopIteration, in one process or in all."""
        return not self.has_every_batch

    @property
    def sequential(self) -> bool:
        """Whether batches are read by one thread at a time."""
        return self.forward_only

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the samples; None if they are not text."""
        return None

    @property
    def parts(self) -> Mapping[str, Data]:
        """Data that are evaluated each for itself, by name; empty if they are one."""
        return {}

    def first_batch(self, batch_size: int | None) -> Any:
        """Return a batch with the shapes of all, which is still to be read; None if none is."""
        if self.num_samples == 0:
            return None
        return refuse_none(self.batch(0, batch_size or 1), self.batch_name(0))

    def batch_name(self, step: int) -> str:
        """Name the batch of a step for messages, with the user's call that returns it, if any."""
        return f"batch {step}"

    def ids(self, step: int, batch_size: int, rows: Rows | None = None) -> Rows | None:
        """Return the numbers of the samples of one step's batch; None if they have none."""
        return None

    def for_training(self, *, by_epochs: bool) -> Data:
        """Return the data to train on: `by_epochs` if the run is counted in epochs."""
        return self

    def for_one_pass(self, *, in_order: bool) -> Data:
        """Return the data to read every sample once: `in_order` if not in a shuffled order."""
        return self

    def stop_after(self, epochs: float) -> bool:
        """End after this many epochs; return False if the trainer has to count the steps."""
        return False

    def position(self, step: int) -> Any:
        """Return where the batch of this step begins, as JSON; None if the step says so."""
        return None

    def go_to(self, step: int, position: Any) -> None:
        """Continue at a position of an earlier run."""
        return


def refuse_none(batch: Any, name: str) -> Any:
    """Return a batch; raise if it is None, which would shift all batches after it by one."""
    if batch is not None:
        return batch
    raise UserError(
        f"{name} is None",
        why="every step trains on the batch with its own number, and none is left out",
        fix="return a batch for every step; give data that ends as a list or a generator",
    )


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the samples with these numbers, one row each."""
        ...
