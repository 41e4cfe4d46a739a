"""What data of a run are to Meshwright: batches by step, and sources of samples by number."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

HostBatch = dict[str, NDArray[Any]]
Rows = NDArray[np.int64]
"""Places in a global batch, from 0 to its size - 1: what one process needs of it."""


class OutOfData(Exception):
    """There is no batch for this step; every process finds the same."""


class Data(Protocol):
    """Where the batches of a run come from."""

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None if there is no end, or none that is known."""
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
        """Return one line for people."""
        ...


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the samples with these numbers, one row each."""
        ...
