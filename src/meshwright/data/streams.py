"""Data that is read in order: iterables and generators of batches or of samples."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.elements import Expected
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.indexed_data import count_samples, select_rows
from meshwright.data.protocols import Data, OutOfData, Rows, refuse_none
from meshwright.data.samples import plain_tree, stack_samples
from meshwright.errors import UserError

KEPT_POSITIONS = 2048
"""Positions that are remembered: more than the batches that are read ahead."""

READ_AGAIN = "give a list, or a function of (step, batch_size)"


@dataclass(kw_only=True)
class IterableData(Data):
    """Batches of an iterable, in its order; steps can only move forward.

    Attributes:
        open: returns an iterator over the elements of an epoch, given its number from 0.
        samples: whether the elements are samples, which are stacked into batches.
        repeat: whether to begin again where the iterable ends.
        length: elements of one pass; None if that is not known.
        again: what to write instead of an iterable that can be read only once.
        one_pass: read every element once, a short last batch included, as evaluation does.
        epochs: passes after which the data ends; None for no limit.
    """

    open: Callable[[int], Iterator[Any]]
    name: str
    samples: bool = False
    once: bool = False
    repeat: bool = False
    length: int | None = None
    order: str = ""
    again: str = READ_AGAIN
    one_pass: bool = False
    epochs: int | None = None
    _stream: Iterator[Any] | None = None
    _ahead: list[Any] = field(default_factory=list[Any])
    _pending: list[Any] = field(default_factory=list[Any])
    _epoch: int = 0
    _read: int = 0
    _next: int = 0
    _last: Any = None
    _size: int = 0
    _dropped: int = 0
    _positions: dict[int, Any] = field(default_factory=dict[int, Any])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    any_batch_size = False
    forward_only = True

    @property
    def num_dropped(self) -> int:
        """Samples of a short last batch that was left out."""
        return self._dropped

    @property
    def endless(self) -> bool:
        """Whether the number of elements is not known."""
        return self.length is None

    def with_elements(self, expected: Expected, *, samples: bool) -> IterableData:
        """Find out if the elements are samples or batches, unless the user says; return self."""
        first = None if samples else self._first()
        self.samples = samples or (first is not None and expected.are_samples(first, self.name))
        return self

    def _first(self) -> Any:
        """Return the first element, whatever its size; None if there is none."""
        with self._lock:
            if self._next:
                return self._last
            if not self._ahead:
                self._ahead = list(itertools.islice(self._iterator(), 1))
            first = None
            if self._ahead:
                first = refuse_none(plain_tree(self._ahead[0]), f"element 0 of {self.name}")
            self._size = self._size or count_samples(first)
            return first

    def first_batch(self, batch_size: int | None) -> Any:
        """Return a batch with the shapes of all, without reading it; None if there is none."""
        first = self._first()
        if first is None or not self.samples or self._next:
            return first
        return stack_samples([first] * (batch_size or 1), [0] * (batch_size or 1))

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> Any:
        """Return the batch of this step, skipping those before it."""
        with self._lock:
            if step < self._next - 1:
                self._restart(step)
            while self._next <= step:
                self._last = self._stacked(batch_size) if self.samples else self._whole()
                self._next += 1
                self._note_position()
            return select_rows(self._last, batch_size, self.batch_name(step), rows)

    def for_one_pass(self, *, in_order: bool) -> Data:
        """Read every element once, a short last batch included."""
        self.one_pass = True
        return self

    def stop_after(self, epochs: float) -> bool:
        """End after this many passes over the elements."""
        if epochs != int(epochs):
            raise UserError(
                f"{epochs:g} epochs cannot be counted",
                why=f"{self.name} does not say how many samples it has",
                fix="write a whole number of epochs, or steps=…",
            )
        if self.once and epochs > 1:
            raise UserError(
                f"{epochs:g} epochs need data that can be read again",
                why=f"{self.name} can be read only once",
                fix=self.again,
            )
        self.epochs = int(epochs)
        return True

    def position(self, step: int) -> Any:
        """Return where the batch of this step begins, as JSON; None if that is not known."""
        found = self._positions.get(step)
        try:
            return found if json.loads(json.dumps(found)) == found else None
        except (TypeError, ValueError):
            # Then a resumed run rereads the elements before it.
            return None

    def go_to(self, step: int, position: Any) -> None:
        """Continue at a position of an earlier run, without reading what comes before it."""
        with self._lock:
            stream: Any = self.open(position["epoch"])
            if not hasattr(stream, "set_state"):
                return
            stream.set_state(position["iterator"])
            self._stream, self._ahead, self._pending = stream, [], []
            self._epoch, self._read, self._next = position["epoch"], position["read"], step

    def fingerprint(self) -> str:
        """Return the same for every iterable, whose batches cannot be known in advance."""
        return fingerprint_of("iterable")

    def describe(self) -> str:
        """Return the type of the iterable and what it cannot guarantee."""
        return (
            f"an iterable ({self.name}): its order is its own, so a resumed run "
            "sees the same samples only if it yields them again"
        )

    def _iterator(self) -> Iterator[Any]:
        self._stream = self.open(self._epoch) if self._stream is None else self._stream
        return self._stream

    def _element(self) -> Any:
        """Return the next element of this epoch; raise StopIteration at its end."""
        element = self._ahead.pop(0) if self._ahead else next(self._iterator())
        self._read += 1
        return refuse_none(element, f"element {self._read - 1} of {self.name}")

    def _whole(self) -> Any:
        """Return the next batch; a short last one is left out in training."""
        while True:
            batch = plain_tree(self._next_element())
            size = count_samples(batch)
            self._size = self._size or size
            if self.one_pass or size >= self._size:
                return batch
            try:
                self._ahead.append(self._element())
                self._read -= 1
            except StopIteration:
                self._dropped = size
                self._end_epoch()
            else:
                # A short batch in between is for the check of the batches' shapes.
                return batch

    def _stacked(self, size: int) -> Any:
        """Return the next samples as a batch; it may cross the end of an epoch."""
        while len(self._pending) < size:
            try:
                self._pending.append(self._next_element(within=bool(self._pending)))
            except OutOfData:
                if self._pending and self.one_pass:
                    break
                self._dropped = len(self._pending)
                raise
        samples, self._pending = self._pending[:size], self._pending[size:]
        start = self._next * size
        return stack_samples(samples, range(start, start + len(samples)))

    def _next_element(self, *, within: bool = False) -> Any:
        """Return the next element, of the next epoch at the end of one.

        The last epoch may borrow from another to complete a batch (``within``).
        """
        for _ in range(2):
            if self.epochs is not None and self._epoch >= self.epochs and not within:
                break
            try:
                return self._element()
            except StopIteration:
                if self.once or self.one_pass or not self._repeats or not self._read:
                    break
                self._end_epoch()
        raise OutOfData(f"{self.name} ended after {self._next} batches")

    @property
    def _repeats(self) -> bool:
        return self.repeat or self.epochs is not None

    def _end_epoch(self) -> None:
        if self._repeats and not self.once:
            self._stream, self._epoch, self._read = None, self._epoch + 1, 0

    def _note_position(self) -> None:
        get_state = getattr(self._stream, "get_state", None)
        if get_state is None or self._ahead or self._pending:
            return
        self._positions[self._next] = {
            "epoch": self._epoch,
            "read": self._read,
            "iterator": copy.deepcopy(get_state()),
        }
        self._positions.pop(self._next - KEPT_POSITIONS, None)

    def _restart(self, step: int) -> None:
        if self.once:
            raise UserError(
                f"batch {step} of the iterable is gone",
                why=f"{self.name} can be read only once, and is now at batch {self._next}",
                fix=self.again,
            )
        self._stream, self._next, self._epoch, self._read = None, 0, 0, 0
        self._ahead, self._pending = [], []
