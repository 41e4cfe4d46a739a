"""Data from the user: arrays, a source, a function, a sequence or an iterable of batches."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshwright.config.builders import Builder, build, parameters_of
from meshwright.data.arrays import ArraySource
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import Data, HostBatch, OutOfData, Rows, Source
from meshwright.data.source_data import SourceData, take_rows
from meshwright.errors import UserError
from meshwright.processes import process_count
from meshwright.trees import Batch

UserData = Data | Source | Iterable[Batch] | Callable[..., Batch]
"""Data as users pass it; see `as_data`."""

BATCH_PARAMETERS = ("step", "batch_size")
"""The parameters of a function that returns batches: the update and the batch size."""


@dataclass(frozen=True)
class FunctionData:
    """Batches returned by a function of the update and the batch size.

    Attributes:
        function: called as ``function(step=…, batch_size=…)``; returns the whole global batch.
        name: the function's name, for messages.
    """

    function: Callable[..., HostBatch]
    name: str = "function"

    num_samples = None

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the function's batch, or these rows of it."""
        return take_rows(self.function(step=step, batch_size=batch_size), rows)

    def fingerprint(self) -> str:
        """Return a fingerprint of the function's name and settings, not of its code."""
        settings: dict[str, Any] = getattr(self.function, "keywords", {})
        shown = sorted((name, repr(value)) for name, value in settings.items() if name != "seed")
        return fingerprint_of("function", self.name, shown)

    def describe(self) -> str:
        """Name the function."""
        return f"batches of {self.name}"


@dataclass(frozen=True)
class DataAdapter:
    """Completes a user's object that has ``batch(step, batch_size)`` but not all of `Data`."""

    given: Any

    @property
    def num_samples(self) -> int | None:
        """The object's own number of samples, if it has one."""
        return getattr(self.given, "num_samples", None)

    @property
    def tokenizer(self) -> Any:
        """The object's own tokenizer, if it has one."""
        return getattr(self.given, "tokenizer", None)

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return its batch; a method that takes ``rows`` reads only those."""
        if "rows" in parameters_of(self.given.batch):
            return self.given.batch(step, batch_size, rows=rows)
        return take_rows(self.given.batch(step, batch_size), rows)

    def fingerprint(self) -> str:
        """Return its own fingerprint, or one of its class."""
        return self._own("fingerprint", fingerprint_of(type(self.given).__qualname__))

    def describe(self) -> str:
        """Return its own description, or the name of its class."""
        return self._own("describe", type(self.given).__name__)

    def _own(self, method: str, otherwise: str) -> str:
        own = getattr(self.given, method, None)
        return str(own()) if callable(own) else otherwise


@dataclass(frozen=True)
class SequenceData:
    """Batches in a list, or in anything else with a length and items."""

    batches: Sequence[Any]

    num_samples = None

    def first(self) -> Any:
        """Return the first batch, whatever its size; None if there is none."""
        return self.batches[0] if len(self.batches) else None

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> Any:
        """Return the batch of this step, or these rows of it."""
        if step >= len(self.batches):
            raise OutOfData(f"{len(self.batches)} batches were passed")
        return _select_rows(self.batches[step], batch_size, step, rows)

    def fingerprint(self) -> str:
        """Return a fingerprint of the number of batches only."""
        return fingerprint_of("sequence", len(self.batches))

    def describe(self) -> str:
        """Return the number of batches in words."""
        return f"{len(self.batches)} batches"


@dataclass
class IterableData:
    """Batches of an iterable, in its order; steps can only move forward.

    Attributes:
        batches: yields whole global batches.
        sequential: makes the loader read one step at a time.
    """

    batches: Iterable[Any]
    sequential: bool = True
    _stream: Iterator[Any] | None = None
    _next: int = 0
    _last: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    num_samples = None

    def first(self) -> Any:
        """Return the first batch, whatever its size; None if there is none."""
        with self._lock:
            try:
                if not self._next:
                    self._advance()
            except OutOfData:
                return None
            return self._last

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> Any:
        """Return the batch of this step, skipping those before it."""
        with self._lock:
            if step < self._next - 1:
                self._restart(step)
            while self._next <= step:
                self._advance()
            return _select_rows(self._last, batch_size, step, rows)

    def fingerprint(self) -> str:
        """Return the same for every iterable, whose batches cannot be known in advance."""
        return fingerprint_of("iterable")

    def describe(self) -> str:
        """Return the type of the iterable and what it cannot guarantee."""
        return (
            f"an iterable ({type(self.batches).__name__}): its order is its own, so a resumed run "
            "sees the same samples only if it yields them again"
        )

    def _advance(self) -> None:
        self._stream = iter(self.batches) if self._stream is None else self._stream
        try:
            self._last = next(self._stream)
        except StopIteration:
            raise OutOfData(f"the iterable ended after {self._next} batches") from None
        self._next += 1

    def _restart(self, step: int) -> None:
        if self._stream is self.batches:
            raise UserError(
                f"batch {step} of the iterable is gone",
                why=f"a {type(self.batches).__name__} can be iterated only once, and is now at "
                f"batch {self._next}",
                fix="give a list, or a function of (step, batch_size)",
            )
        self._stream, self._next = None, 0


def as_data(given: Any, seed: int = 0, *, num_processes: int | None = None) -> Data:
    """Return the data a user passes for training as `Data`.

    Args:
        given: Data; a source with ``len`` and ``rows(ids)``; a dict of arrays; a function of
            (step, batch_size) or (seed, step, batch_size); a sequence of batches; or an iterable.
        seed: seed of the order, where Meshwright chooses it.
        num_processes: processes of the run; those of JAX by default. A bare iterable is refused
            for more than one, because they might not all get the same batches.
    """
    if callable(getattr(given, "batch", None)) and not hasattr(given, "__getitem__"):
        return given if _is_data(given) else DataAdapter(given)
    if is_source(given):
        return SourceData(given, seed)
    if isinstance(given, Mapping):
        _check_names(given)
        return SourceData(ArraySource(**given), seed)
    if hasattr(given, "shape") or isinstance(given, str | bytes):
        raise UserError(
            f"the data are a single {type(given).__name__}",
            why="each update takes a batch of samples",
            fix="write a dict of arrays such as {'x': x, 'y': y}, or a list of batches",
        )
    if isinstance(given, tuple) and all(hasattr(part, "shape") for part in given):
        raise UserError(
            f"the data are a tuple of {len(given)} arrays",
            why="these could be separate batches, or the fields of one dataset",
            fix="write a dict of arrays such as {'x': x, 'y': y}, or a list of batches",
        )
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return SequenceData(given)
    if isinstance(given, Iterable):
        return _iterable_data(given, num_processes)
    if callable(given):
        return _function_data(given, seed)
    raise UserError(
        f"the data are of type {type(given).__name__}, which provides no batches",
        fix="write a dict of arrays, a function of (step, batch_size), or a list of batches",
    )


def is_batch_function(builder: Builder) -> bool:
    """Whether a builder itself returns batches: a function of ``step`` and ``batch_size``."""
    return not inspect.isclass(builder) and set(BATCH_PARAMETERS) <= set(parameters_of(builder))


def _check_names(arrays: Mapping[Any, Any]) -> None:
    for name in arrays:
        if not isinstance(name, str):
            raise UserError(
                f"the data have an array named {name!r:.60}, of type {type(name).__name__}",
                fix='name each array by a text: {"x": images, "y": labels}',
            )


def is_source(made: Any) -> bool:
    """Whether an object is a source of samples: it has a length and ``rows(ids)``."""
    return callable(getattr(made, "rows", None)) and hasattr(made, "__len__")


def read_data(kind: str, builder: Builder, arguments: dict[str, Any]) -> Data | Source:
    """Return the data or the source ``kind`` names.

    That is a function of ``step`` and ``batch_size``, or a class or function that returns an
    object with ``batch(step, batch_size)``, or with ``len`` and ``rows(ids)``.
    """
    if is_batch_function(builder):
        return FunctionData(partial(builder, **arguments), kind)
    made = build("data", kind, builder, arguments)
    if callable(getattr(made, "batch", None)):
        return as_data(made)
    if is_source(made):
        return made
    raise UserError(
        f"data.kind={kind} returns no batches",
        why=f"it returned a {type(made).__name__}, with neither batch() nor rows() and a length",
        fix="give it a method batch(self, step, batch_size) that returns a dict of arrays, or name "
        "a function of step and batch_size",
    )


def _is_data(given: Any) -> bool:
    methods = all(callable(getattr(given, name, None)) for name in ("fingerprint", "describe"))
    return methods and hasattr(given, "num_samples") and "rows" in parameters_of(given.batch)


def _iterable_data(given: Iterable[Any], num_processes: int | None) -> IterableData:
    num_processes = num_processes or process_count()
    if num_processes > 1:
        raise UserError(
            f"an iterable ({type(given).__name__}) cannot feed {num_processes} processes",
            why="nothing guarantees that each of them gets the same batches",
            fix="give a function of (seed, step, batch_size), a list, or a dict of arrays",
        )
    return IterableData(given)


def _function_data(given: Callable[..., Any], seed: int) -> FunctionData:
    parameters = parameters_of(given)
    name = getattr(given, "__name__", type(given).__name__)
    if set(BATCH_PARAMETERS) <= set(parameters):
        with_seed = {"seed": seed} if "seed" in parameters else {}
        return FunctionData(partial(given, **with_seed), name)
    required = [p for p in parameters.values() if p.default is p.empty]
    if len(required) == 2:
        return FunctionData(lambda step, batch_size: given(step, batch_size), name)
    if len(required) == 3:
        return FunctionData(lambda step, batch_size: given(seed, step, batch_size), name)
    if len(required) == 1 and len(parameters) == 2:
        return FunctionData(lambda step, batch_size: given(step, batch_size), name)
    raise UserError(
        f"the function {name} returns no batches",
        why=f"it takes ({', '.join(parameters)})",
        fix="write a function of (step, batch_size), or of (seed, step, batch_size)",
    )


def _select_rows(batch: Any, batch_size: int, step: int, rows: Rows | None) -> Any:
    """Return these rows of a batch, which must have the size of the global batch."""
    if rows is None:
        return batch
    shape = _first_shape(batch)
    size = shape[0] if shape else batch_size
    if size != batch_size:
        raise UserError(
            f"batch {step} has {size} samples",
            why=f"the global batch has {batch_size}",
            fix="give batches of one size; drop a short last one",
        )
    return take_rows(batch, rows)


def _first_shape(batch: Any) -> tuple[int, ...]:
    """Return the shape of the first array; empty if there is none, which `read_batch` refuses."""
    if isinstance(batch, Mapping):
        return _first_shape(next(iter(batch.values()), ()))
    if isinstance(batch, list | tuple):
        return _first_shape(batch[0]) if batch else ()
    return tuple(getattr(batch, "shape", ()))
