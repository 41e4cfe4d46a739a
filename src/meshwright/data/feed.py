"""Where the batches of a run come from: made up by the task, read from a source, or the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.config.builders import Builder, build, parameters_of
from meshwright.data.order import sample_ids
from meshwright.errors import UserError

HostBatch = dict[str, NDArray[Any]]

BATCH_PARAMETERS = ("step", "batch_size")
"""What a function that gives batches takes: the update's number and the samples of a batch."""


class Data(Protocol):
    """Where the batches of a run come from."""

    def batch(self, step: int, batch_size: int) -> HostBatch:
        """Return the global batch of one update: a function of the seed and the step alone."""
        ...


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the samples with these numbers, one row each."""
        ...


@dataclass(frozen=True)
class SyntheticData:
    """Batches made up by the task, different for every step.

    Attributes:
        make: makes a batch from a seed and a size.
        seed: of the run.
    """

    make: Callable[[int, int], HostBatch]
    seed: int

    def batch(self, step: int, batch_size: int) -> HostBatch:
        """Return the made-up batch of one update."""
        mixed = np.random.SeedSequence((self.seed, step)).generate_state(1)[0]
        return self.make(int(mixed), batch_size)


@dataclass(frozen=True)
class SourceData:
    """Batches read from a source in the global order."""

    source: Source
    seed: int

    def batch(self, step: int, batch_size: int) -> HostBatch:
        """Return the rows of one update."""
        ids = sample_ids(
            seed=self.seed, step=step, batch_size=batch_size, num_samples=len(self.source)
        )
        return dict(self.source.rows(ids))


@dataclass(frozen=True)
class FunctionData:
    """Batches given by a function of the update's number and the batch size."""

    function: Callable[..., HostBatch]

    def batch(self, step: int, batch_size: int) -> HostBatch:
        """Return what the function gives."""
        return self.function(step=step, batch_size=batch_size)


def is_batch_function(builder: Builder) -> bool:
    """Whether it is itself what gives the batches: a function of ``step`` and ``batch_size``."""
    return not inspect.isclass(builder) and set(BATCH_PARAMETERS) <= set(parameters_of(builder))


def read_data(kind: str, builder: Builder, arguments: dict[str, Any], seed: int) -> Data:
    """Return the data ``kind`` names.

    It is a function of ``step`` and ``batch_size``; or a class or function that gives an object
    with ``batch(step, batch_size)``, or with ``len`` and ``rows(ids)``.
    """
    if is_batch_function(builder):
        return FunctionData(partial(builder, **arguments))
    made = build("data", kind, builder, arguments)
    if callable(getattr(made, "batch", None)):
        return made
    if callable(getattr(made, "rows", None)) and hasattr(made, "__len__"):
        return SourceData(made, seed)
    raise UserError(
        f"data.kind={kind} gives no batches",
        why=f"it made a {type(made).__name__}, which has neither batch nor rows and a length",
        fix="give it a method batch(self, step, batch_size) that returns a dict of arrays, or name "
        "a function of step and batch_size",
    )
