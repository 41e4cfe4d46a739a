"""Data with a batch for any step: read from a source, synthetic, or given as a list."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from meshwright.data.contents import list_contents
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.order import sample_ids
from meshwright.data.protocols import Data, HostBatch, OutOfData, Rows, Source, refuse_none
from meshwright.data.samples import leaf_shapes, plain_tree
from meshwright.errors import UserError


@dataclass(frozen=True)
class SourceData(Data):
    """Batches read from a source in the global order, shuffled anew each epoch if asked for.

    The source may also have ``fingerprint()``, ``describe()`` and ``tokenizer``.
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
        """Return the batch of one step, or these rows of it."""
        batch: Any = self.source.rows(self.ids(step, batch_size, rows))
        return dict(batch) if isinstance(batch, Mapping) else batch

    def batch_name(self, step: int) -> str:
        """Name the batch with the method of the source that returns it."""
        return f"batch {step} ({type(self.source).__name__}.rows())"

    def ids(self, step: int, batch_size: int, rows: Rows | None = None) -> Rows:
        """Return the numbers of the samples of one step's batch, or of these rows of it."""
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
    """Batches made from a seed and a size, different for every step and every ``stream``."""

    make: Callable[[int, int], HostBatch]
    seed: int
    stream: tuple[int, ...] = ()

    eval_batches = 16

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the synthetic batch of one step."""
        mixed = np.random.SeedSequence((self.seed, step, *self.stream)).generate_state(1)[0]
        return take_rows(self.make(int(mixed), batch_size), rows)

    def fingerprint(self) -> str:
        """Return a fingerprint of the task's name and sizes."""
        return fingerprint_of("synthetic", repr(getattr(self.make, "__self__", "")), self.stream)

    def describe(self) -> str:
        """Say that the samples are synthetic."""
        return "synthetic samples"


def take_rows(batch: Any, rows: Rows | None) -> Any:
    """Return these rows of a batch's arrays; all of them if ``rows`` is None."""
    if rows is None:
        return batch
    return jax.tree.map(lambda array: np.asarray(array)[rows] if np.ndim(array) else array, batch)


def _own(source: Any, method: str) -> str:
    asked = getattr(source, method, None)
    if callable(asked):
        return str(asked())
    return f"{type(source).__name__}, {len(source):,} samples"


ENDLESS = 2**40
"""Datasets of at least this length are repeated without end, for which Grain uses huge lengths."""


@dataclass(frozen=True)
class SequenceData(Data):
    """Batches in a list, or in anything else with a length and items.

    ``cycle`` begins again after the last one; with ``own_epochs``, as in Grain, items beyond the
    length are those of further epochs. In ``training``, a short last batch is left out, since a
    step is compiled for one size.
    """

    batches: Sequence[Any]
    cycle: bool = False
    own_epochs: bool = False
    training: bool = False

    any_batch_size = False

    @property
    def num_samples(self) -> int | None:
        """Samples of the batches of an epoch that are trained on; None if it is not counted."""
        first = self.first_batch(None)
        if not self.cycle or first is None or self.endless:
            return None
        return self._per_epoch * count_samples(first)

    @property
    def endless(self) -> bool:
        """Whether the batches are repeated without end."""
        return len(self.batches) >= ENDLESS

    @property
    def num_dropped(self) -> int:
        """Samples of a short last batch, which is not trained on; 0 if it is not short."""
        return self._dropped

    @cached_property
    def _dropped(self) -> int:
        if self.endless or len(self.batches) < 2:
            return 0
        last, first = (count_samples(self.batches[at]) for at in (len(self.batches) - 1, 0))
        return last if last < first else 0

    @property
    def _per_epoch(self) -> int:
        return len(self.batches) - bool(self.num_dropped)

    def first_batch(self, batch_size: int | None) -> Any:
        """Return the first batch, whatever its size; None if there is none."""
        if not len(self.batches):
            return None
        return refuse_none(plain_tree(self.batches[0]), self.batch_name(0))

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> Any:
        """Return the batch of this step, or these rows of it."""
        last = self._per_epoch if self.training else len(self.batches)
        if not self.cycle and step >= last:
            raise OutOfData(f"{last} batches were passed")
        at = step
        if self.cycle:
            epoch, at = divmod(step, self._per_epoch)
            at += epoch * len(self.batches) if self.own_epochs else 0
        return select_rows(plain_tree(self.batches[at]), batch_size, self.batch_name(step), rows)

    def for_training(self, *, by_epochs: bool) -> Data:
        """Return the batches without a short last one, repeated for a run of epochs."""
        return replace(self, cycle=self.cycle or by_epochs, training=True)

    def for_one_pass(self, *, in_order: bool) -> Data:
        """Return the batches, each of them once."""
        return replace(self, cycle=False)

    def fingerprint(self) -> str:
        """Return a fingerprint of the number of batches, and of the contents of a list."""
        return fingerprint_of("sequence", len(self.batches), *list_contents(self.batches))

    def describe(self) -> str:
        """Return the number of batches in words."""
        return f"{len(self.batches)} batches"


def select_rows(batch: Any, batch_size: int, name: str, rows: Rows | None) -> Any:
    """Return these rows of a batch, whose arrays must have the size of the global batch."""
    if rows is None:
        return batch
    sizes = (shape[0] for shape in leaf_shapes(batch).values() if shape)
    for size in (each for each in sizes if each != batch_size):
        raise UserError(
            f"{name} has {size} samples",
            why=f"the global batch has {batch_size}",
            fix="give batches of one size; drop a short last one",
        )
    return take_rows(batch, rows)


def count_samples(batch: Any, default: int = 0) -> int:
    """Return the size of dim 0 of the first array; ``default`` if there is none."""
    shape = next(iter(leaf_shapes(batch).values()), ())
    return shape[0] if shape else default
