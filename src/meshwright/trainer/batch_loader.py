"""Loading batches: read ahead in their global order, placed on the mesh, fed to steps."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding

from meshwright.data.batches import BatchForm, read_batches
from meshwright.data.loader import load_batches
from meshwright.data.protocols import Data
from meshwright.processes import agree, process_count
from meshwright.runtime.heartbeat import Doing, own_heartbeat
from meshwright.runtime.hooks import batch_hooks
from meshwright.step.place_batch import local_rows, place_batch
from meshwright.trainer.incidents.not_finite import MAX_IN_FLIGHT

AHEAD = MAX_IN_FLIGHT + 1
"""Batches that a process has in hand besides the next one: as far as others can run ahead of it."""

Range = Sequence[int]
"""The first and the last of some batches, both included."""

Numbered = tuple[int, Any]
"""A batch with its number."""


@dataclass
class BatchLoader:
    """Loads the batches of a run, one per step, onto the devices.

    All have the form of the batch that they are ``like``, or of the first. ``waited`` are seconds
    spent waiting for batches.
    """

    data: Data
    batch_size: int
    sharding: NamedSharding
    workers: int = 0
    prefetch: int = 4
    like: BatchForm | None = None
    waited: float = 0.0

    def __post_init__(self) -> None:
        self._rows = local_rows(self.sharding, self.batch_size)
        own = self.batch_size if self._rows is None else len(self._rows)
        self._like = None if self.like is None else self.like.with_samples(own)

    @contextmanager
    def open(
        self, start: int, stop: int | None, on_end: Callable[[int], object] = lambda _: None
    ) -> Generator[Iterator[list[Any]]]:
        """Iterate over the batches from step ``start`` on; reading ends with the block.

        If the data end before ``stop``, ``on_end`` is called with the first batch that is missing,
        early enough for all processes to agree to stop before it.
        """
        loaded = load_batches(
            self.data,
            batch_size=self.batch_size,
            start=start,
            stop=stop,
            rows=self._rows,
            workers=self.workers,
            prefetch=self.prefetch,
        )
        try:
            yield self._placed(self._named(loaded, start, stop, on_end), start)
        finally:
            loaded.close()

    def _named(
        self, loaded: Iterator[Any], first: int, stop: int | None, on_end: Callable[[int], object]
    ) -> Iterator[Any]:
        """Yield checked batches; an early end is told before the last ones are used."""
        names = self.data.batch_name
        batches = read_batches(loaded, self._like, lambda number: names(first + number))
        if process_count() == 1 or not (self.data.has_every_batch and self.data.may_end):
            yield from batches
            return
        in_hand: deque[Any] = deque()
        end = first
        for batch in batches:
            end += 1
            in_hand.append(batch)
            if len(in_hand) > AHEAD:
                yield in_hand.popleft()
        if stop is None or end < stop:
            on_end(end)
        yield from in_hand

    def _placed(self, batches: Iterator[Any], first: int) -> Iterator[list[Any]]:
        for number in itertools.count(first):
            started = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - started
            if not self._all_have(batch):
                return
            for hook in batch_hooks:
                batch = hook(number, batch)
            yield place_batch(batch, self.sharding, self.batch_size, self._rows)

    def _all_have(self, batch: Any) -> bool:
        """Whether all processes have a batch; data of unknown size may end earlier in one."""
        # Asking each time costs a round trip.
        if process_count() == 1 or self.data.has_every_batch:
            return batch is not None
        # A process with slow data makes the others wait, which is not their own data's fault.
        with own_heartbeat().during(Doing.WAITING):
            return agree(batch is not None, "all")


@dataclass
class BatchFeed:
    """Feeds one batch to each step, and again to steps that changed nothing.

    Batches are numbered from 0, as the data have them; those in ``left_out`` the run left out when
    it went back. ``end_of_data`` is called with the last step that has a batch.
    """

    loader: BatchLoader
    left_out: list[list[int]]
    end_of_data: Callable[[int], object] = lambda _: None
    _recent: deque[Numbered] = field(default_factory=lambda: deque(maxlen=MAX_IN_FLIGHT + 1))
    _again: deque[Numbered] = field(default_factory=deque[Numbered])
    _stack: ExitStack = field(default_factory=ExitStack)
    _stream: Iterator[Any] | None = None
    _ends: int | None = None

    @contextmanager
    def open(self, done: int, last: int | None) -> Generator[None]:
        """Begin to read the batches after a step; reading ends with the block."""
        self._read_from(self.number(done + 1), last)
        try:
            yield
        finally:
            self._stack.close()

    @property
    def waited(self) -> float:
        """Seconds spent waiting for batches."""
        return self.loader.waited

    def number(self, step: int) -> int:
        """Return the number of the batch that a step gets."""
        return step - 1 + count_batches(self.left_out)

    def next(self, step: int, last: int | None) -> Any:
        """Return the batch of this step; None if it is after the last one, or has no batch."""
        if last is not None and step > last:
            return None
        number = self.number(step)
        if self._again:
            _, batch = self._again.popleft()
        else:
            if self._ends is not None and number >= self._ends:
                self._read_from(number, last)
            assert self._stream is not None
            batch = next(self._stream, None)
        if batch is not None:
            self._recent.append((number, batch))
        return batch

    def back_to(self, step: int) -> Any:
        """Return the batch of a step, and feed those after it again."""
        number = self.number(step)
        after = [each for each in self._recent if each[0] > number]
        found = next(batch for n, batch in self._recent if n == number)
        self._again.extendleft(reversed(after))
        self._recent.clear()
        return found

    def leave_out(self, earlier: Sequence[Range], first: int, last: int) -> None:
        """Leave out these batches from now on, besides those of an earlier state."""
        self.left_out[:] = [*map(list, earlier), [first, last]]

    def _read_from(self, number: int, last: int | None) -> None:
        self._stack.close()
        self._ends = None if last is None else self.number(last + 1)

        def tell(end: int) -> None:
            self.end_of_data(end - count_batches(self.left_out))

        self._stream = self._stack.enter_context(self.loader.open(number, self._ends, tell))


def count_batches(ranges: Sequence[Range]) -> int:
    """Return how many batches ranges have in all."""
    return sum(last - first + 1 for first, last in ranges)
