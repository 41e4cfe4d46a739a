"""Batches in a list, or in anything else with a length and items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import Data, OutOfData, Rows
from meshwright.data.source_data import take_rows
from meshwright.data.stack import plain_tree
from meshwright.errors import UserError

ENDLESS = 2**40
"""Datasets of at least this length are repeated without end, for which Grain uses huge lengths."""


@dataclass(frozen=True)
class SequenceData(Data):
    """Batches in a list, or in anything else with a length and items.

    Attributes:
        batches: the batches.
        cycle: begin again after the last one instead of ending.
        own_epochs: items beyond the length are those of further epochs, as in Grain.
        training: a short last batch is left out, since a step is compiled for one size.
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
        return plain_tree(self.batches[0]) if len(self.batches) else None

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> Any:
        """Return the batch of this step, or these rows of it."""
        last = self._per_epoch if self.training else len(self.batches)
        if not self.cycle and step >= last:
            raise OutOfData(f"{last} batches were passed")
        at = step
        if self.cycle:
            epoch, at = divmod(step, self._per_epoch)
            at += epoch * len(self.batches) if self.own_epochs else 0
        return select_rows(plain_tree(self.batches[at]), batch_size, step, rows)

    def for_training(self, *, by_epochs: bool) -> Data:
        """Return the batches without a short last one, repeated for a run of epochs."""
        return replace(self, cycle=self.cycle or by_epochs, training=True)

    def for_one_pass(self, *, in_order: bool) -> Data:
        """Return the batches, each of them once."""
        return replace(self, cycle=False)

    def fingerprint(self) -> str:
        """Return a fingerprint of the number of batches only."""
        return fingerprint_of("sequence", len(self.batches))

    def describe(self) -> str:
        """Return the number of batches in words."""
        return f"{len(self.batches)} batches"


def select_rows(batch: Any, batch_size: int, step: int, rows: Rows | None) -> Any:
    """Return these rows of a batch, which must have the size of the global batch."""
    if rows is None:
        return batch
    size = count_samples(batch, batch_size)
    if size != batch_size:
        raise UserError(
            f"batch {step} has {size} samples",
            why=f"the global batch has {batch_size}",
            fix="give batches of one size; drop a short last one",
        )
    return take_rows(batch, rows)


def count_samples(batch: Any, default: int = 0) -> int:
    """Return the size of dim 0 of the first array; ``default`` if there is none."""
    shape = _first_shape(batch)
    return shape[0] if shape else default


def _first_shape(batch: Any) -> tuple[int, ...]:
    """Return the shape of the first array; empty if there is none, which `read_batch` refuses."""
    if isinstance(batch, Mapping):
        return _first_shape(next(iter(batch.values()), ()))
    if isinstance(batch, list | tuple):
        return _first_shape(batch[0]) if batch else ()
    return tuple(getattr(batch, "shape", ()))
