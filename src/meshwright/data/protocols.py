"""The protocols of data: batches by step, and sources of samples by number."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

HostBatch = dict[str, NDArray[Any]]
Rows = NDArray[np.int64]
"""Row numbers within a global batch: those that one process needs."""


class OutOfData(Exception):
    """There is no batch for this step, in any process."""


class Data(Protocol):
    """Where the batches of a run come from."""

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None if the data are endless or their size is unknown."""
        ...

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the global batch of one update, or only these rows of it.

        It is a function of the seed and the step alone.
        """
        ...

    def fingerprint(self) -> str:
        """Return a short text that changes when the samples or their numbering do."""
        ...

    def describe(self) -> str:
        """Return a description in one line."""
        ...


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the samples with these numbers, one row each."""
        ...
