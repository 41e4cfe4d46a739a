"""Batches for evaluation and prediction: every sample of the data exactly once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.data.batches import form_of, read_batch, read_batches
from meshwright.data.loader import load_batches
from meshwright.data.protocols import Data, Rows
from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import agree, process_count
from meshwright.step.assemble import Assembled
from meshwright.step.place_batch import local_rows, place_batch


@dataclass(frozen=True)
class PlacedBatch:
    """A batch on the mesh, nested as on the host, and its microbatches for pipeline stages."""

    arrays: Any
    num_samples: int
    num_microbatches: int


class EverySample:
    """Places every sample of some data on the mesh exactly once.

    Full batches come first, each as large as what the devices work on at a time in training. The
    remainder is a separate batch. If it cannot be sharded evenly over the mesh, it is placed
    unsharded, and the compiled program shards it unevenly. Batches that are given stay as they
    are. At most ``limit`` batches as large as those of training are used; ``num_samples`` is None
    if the batches have to be counted.
    """

    def __init__(
        self, assembled: Assembled, data: Data, *, limit: int | None = None, in_order: bool = False
    ) -> None:
        plan = assembled.plan
        self._synthetic = limit is None and data.eval_batches is not None
        self._limit = data.eval_batches if limit is None else limit
        self.data, self._plan = data.for_one_pass(in_order=in_order), plan
        self._sharding = assembled.step.shardings.batch
        self._unsharded = NamedSharding(assembled.mesh, PartitionSpec())
        # Pipeline stages work on several microbatches at a time.
        self._max_microbatches = plan.num_microbatches if plan.size("pipe") > 1 else 1
        if not self.data.any_batch_size and self.data.first_batch(1) is None:
            raise no_data()
        if self.data.endless and self._limit is None:
            raise _endless(self.data, predicting=in_order)
        self.num_samples = self._count_samples()

    def note(self) -> str:
        """Say how many samples are used where that is a choice; empty if all are."""
        if self._synthetic:
            return (
                f"each evaluation uses {self.num_samples:,} synthetic samples "
                f"({self._limit} batches), since they have no end; write "
                f"{Setting('training.eval_batches', ANY)} for another number"
            )
        available = self.data.num_samples
        if available is None or self.num_samples is None or self.num_samples == available:
            return ""
        return (
            f"each evaluation uses {self.num_samples:,} of {available:,} samples, because of "
            f"{Setting('training.eval_batches', self._limit)}"
        )

    def first(self) -> Any:
        """Return the first batch, or one sample, on the host; raise if there is none."""
        first = self.data.first_batch(1)
        if first is None:
            raise no_data()
        return read_batch(first)

    def shapes(self, first: Any) -> list[PlacedBatch]:
        """Return the kinds of batches to come, with shapes instead of arrays.

        Without a number of samples, others may differ from the first.
        """
        if self.data.forward_only:
            return []
        size = self._size
        if self.num_samples is None:
            sizes = [form_of(first).num_samples]
        else:
            rest = self.num_samples % size
            whole = rest // self._micro * self._micro
            sizes = [size if self.num_samples >= size else 0, whole, rest - whole]
        return [self._shape(first, size) for size in dict.fromkeys(sizes) if size]

    def _shape(self, first: Any, size: int) -> PlacedBatch:
        def struct(array: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(array.dtype)
            shape = (size, *array.shape[1:])
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding_of(size))

        return PlacedBatch(jax.tree.map(struct, first), size, self._num_microbatches(size))

    def __iter__(self) -> Iterator[PlacedBatch]:
        """Read ahead and place batch after batch."""
        if self.num_samples is None:
            yield from self._given_batches()
        else:
            yield from self._full_batches(self.num_samples // self._size)
            yield from self._remainder(*divmod(self.num_samples, self._size))

    @property
    def _micro(self) -> int:
        return self._plan.batch.micro_batch_size * self._plan.batch.replicas

    @property
    def _size(self) -> int:
        """Samples of a full batch."""
        return self._micro * self._max_microbatches

    def _count_samples(self) -> int | None:
        if not self.data.any_batch_size:
            return None
        available = self.data.num_samples
        if self._limit is None:
            return available
        limit = self._limit * self._plan.batch.global_batch_size
        return limit if available is None else min(limit, available)

    def _full_batches(self, count: int) -> Iterator[PlacedBatch]:
        rows = local_rows(self._sharding, self._size)
        stream = load_batches(self.data, batch_size=self._size, start=0, stop=count, rows=rows)
        with stream:
            read = 0
            for batch in read_batches(stream, name=self.data.batch_name):
                read += 1
                yield self._place(batch, self._size, rows)
        if read < count and process_count() > 1:
            why = f"an evaluation takes {count} batches of {self._size}, in every process"
            raise UserError(f"{self.data.batch_name(read)} does not exist", why=why)

    def _remainder(self, step: int, count: int) -> Iterator[PlacedBatch]:
        """Yield the first ``count`` rows of batch ``step``: whole microbatches, then the rest."""
        whole = count // self._micro * self._micro
        for first, size in ((0, whole), (whole, count - whole)):
            if not size:
                continue
            rows = local_rows(self._sharding_of(size), size)
            wanted = first + (np.arange(size, dtype=np.int64) if rows is None else rows)
            yield self._place(read_batch(self.data.batch(step, self._size, wanted)), size, rows)

    def _given_batches(self) -> Iterator[PlacedBatch]:
        with load_batches(self.data, batch_size=self._size, stop=self._stop()) as stream:
            while True:
                batch = next(stream, None)
                if not agree(batch is not None, "all"):
                    return
                batch = read_batch(batch)
                size = form_of(batch).num_samples
                rows = None if process_count() == 1 else np.arange(size, dtype=np.int64)
                yield self._place(batch, size, rows)

    def _stop(self) -> int | None:
        """Return how many batches to read of data that comes in batches, or as a stream."""
        if self._limit is None or not self.data.samples:
            return self._limit
        return self._limit * max(1, self._plan.batch.global_batch_size // self._size)

    def _place(self, batch: Any, size: int, rows: Rows | None) -> PlacedBatch:
        leaves = place_batch(batch, self._sharding_of(size), size, rows)
        arrays = jax.tree.unflatten(jax.tree.structure(batch), leaves)
        return PlacedBatch(arrays, size, self._num_microbatches(size))

    def _sharding_of(self, size: int) -> NamedSharding:
        divides = size % self._plan.batch.replicas == 0
        return self._sharding if divides else self._unsharded

    def _num_microbatches(self, size: int) -> int:
        each, rest = divmod(size, self._plan.batch.replicas)
        if rest:
            return 1
        return max(n for n in range(1, self._max_microbatches + 1) if each % n == 0)


def no_data() -> UserError:
    """Return the error about data without batches."""
    return UserError(
        "there is no data to evaluate on",
        why="eval_data has no batches; a generator can only be read once",
        fix="give a list of batches, or a dict of arrays",
    )


def _endless(data: Data, *, predicting: bool) -> UserError:
    limit = f"write {Setting('training.eval_batches', 16)} to use 16 batches, or "
    return UserError(
        f"{'predictions' if predicting else 'an evaluation'} might never end",
        why=f"the data do not say how many samples they have ({data.describe()})",
        fix=f"{'' if predicting else limit}give a dict of arrays or a list of batches",
    )
