"""The data of a run: batches read from a source in the global order, or synthetic ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.order import sample_ids
from meshwright.data.protocols import Data, HostBatch, Rows, Source


@dataclass(frozen=True)
class SourceData(Data):
    """Batches read from a source in the global order.

    Attributes:
        source: the samples. It may also have ``fingerprint()``, ``describe()`` and ``tokenizer``.
        seed: seed of the run.
        shuffle: whether each epoch is shuffled anew.
    """

    source: Source
    seed: int
    shuffle: bool = True

    @property
    def num_samples(self) -> int:
        """Samples of the source."""
        return len(self.source)

    @property
    def sequential(self) -> bool:
        """Whether the source is read by one thread at a time."""
        return getattr(self.source, "sequential", False)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the source; None if its samples are not text."""
        return getattr(self.source, "tokenizer", None)

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the batch of one update, or these rows of it."""
        batch: Any = self.source.rows(self.ids(step, batch_size, rows))
        return dict(batch) if isinstance(batch, Mapping) else batch

    def ids(self, step: int, batch_size: int, rows: Rows | None = None) -> Rows:
        """Return the numbers of the samples of one update's batch, or of these rows of it."""
        return sample_ids(
            seed=self.seed,
            step=step,
            batch_size=batch_size,
            num_samples=len(self.source),
            rows=rows,
            shuffle=self.shuffle,
        )

    def for_one_pass(self, *, in_order: bool) -> Data:
        """Return the data, without shuffling if they are wanted in order."""
        return replace(self, shuffle=False) if in_order else self

    def fingerprint(self) -> str:
        """Return the source's own fingerprint, or one of its class and size."""
        return fingerprint_of(_own(self.source, "fingerprint"), self.shuffle)

    def describe(self) -> str:
        """Return the source's description, or its class and size."""
        return _own(self.source, "describe")


@dataclass(frozen=True)
class SyntheticData(Data):
    """Synthetic batches made by the task, different for every step.

    Attributes:
        make: makes a batch from a seed and a size.
        seed: seed of the run.
        stream: further seeds that distinguish these batches from others of the same run.
    """

    make: Callable[[int, int], HostBatch]
    seed: int
    stream: tuple[int, ...] = ()

    eval_batches = 16

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the synthetic batch of one update."""
        mixed = np.random.SeedSequence((self.seed, step, *self.stream)).generate_state(1)[0]
        return take_rows(self.make(int(mixed), batch_size), rows)

    def fingerprint(self) -> str:
        """Return a fingerprint of the task's name, sizes and ``synthetic_version``, if any."""
        task = getattr(self.make, "__self__", "")
        version = getattr(task, "synthetic_version", None)
        facts = () if version is None else (version,)
        return fingerprint_of("synthetic", repr(task), self.stream, *facts)

    def describe(self) -> str:
        """Say that the samples are synthetic."""
        return "synthetic samples"


def take_rows(batch: Any, rows: Rows | None) -> Any:
    """Return these rows of a batch's arrays; all of them if ``rows`` is None."""
    if rows is None:
        return batch
    if isinstance(batch, dict):
        return {name: take_rows(value, rows) for name, value in batch.items()}
    if isinstance(batch, np.ndarray):
        return batch[rows]
    import jax

    return jax.tree.map(lambda array: np.asarray(array)[rows], batch)


def _own(source: Any, method: str) -> str:
    asked = getattr(source, method, None)
    if callable(asked):
        return str(asked())
    return f"{type(source).__name__}, {len(source):,} samples"
