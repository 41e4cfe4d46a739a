"""Data from the user: arrays, datasets, functions, lists and iterables of batches or samples."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from meshwright.config.builders import Builder, build, parameters_of
from meshwright.data.arrays import ArraySource
from meshwright.data.elements import Expected, no_batches, refuse_class, refuse_wrong_data
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.foreign import read_foreign
from meshwright.data.indexed_data import SequenceData, SourceData, select_rows
from meshwright.data.mixture import Mixture, MixtureData, common_form, held_out_parts
from meshwright.data.protocols import Data, HostBatch, Rows, Source
from meshwright.data.samples import Samples, SampleSource
from meshwright.data.streams import IterableData
from meshwright.errors import UserError
from meshwright.processes import process_count
from meshwright.text.units import a_type
from meshwright.trees import Batch


class HasBatches(Protocol):
    """An object with batches by step; it may also have other methods of `Data`."""

    def batch(self, step: int, batch_size: int) -> Any:
        """Return the global batch of one step."""
        ...


UserData = HasBatches | Source | Samples | Mixture | Iterable[Batch] | Callable[..., Batch]
"""Data as users pass it; see `as_data`."""

BATCH_PARAMETERS = ("step", "batch_size")
"""The parameters of a function that returns batches: the step and the batch size."""

_ANY = Expected()


@dataclass(frozen=True)
class FunctionData(Data):
    """Batches returned by ``function(step=…, batch_size=…)``, each the whole global batch."""

    function: Callable[..., HostBatch]
    name: str = "function"

    @property
    def has_every_batch(self) -> bool:
        """True: processes do not ask each other before every step."""
        return True

    @property
    def may_end(self) -> bool:
        """True: a function may still raise StopIteration."""
        return True

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the function's batch, or these rows of it."""
        batch = self.function(step=step, batch_size=batch_size)
        return select_rows(batch, batch_size, self.batch_name(step), rows)

    def batch_name(self, step: int) -> str:
        """Name the batch with the call that returns it."""
        return f"batch {step} ({self.name}(step={step}))"

    def fingerprint(self) -> str:
        """Return a fingerprint of the function's name and settings, not of its code."""
        settings: dict[str, Any] = getattr(self.function, "keywords", {})
        shown = sorted((name, repr(value)) for name, value in settings.items() if name != "seed")
        return fingerprint_of("function", self.name, shown)

    def describe(self) -> str:
        """Name the function."""
        return f"batches of {self.name}"


@dataclass(frozen=True)
class DataAdapter(Data):
    """A user's object that has ``batch(step, batch_size)`` and perhaps more of `Data`."""

    given: Any

    @property
    def num_samples(self) -> int | None:
        """The object's own number of samples, if it has one."""
        return getattr(self.given, "num_samples", None)

    @property
    def may_end(self) -> bool:
        """True: its code may end the data, whatever number of samples it has."""
        return True

    @property
    def sequential(self) -> bool:
        """Whether the object says that it is read by one thread at a time."""
        return getattr(self.given, "sequential", False)

    @property
    def tokenizer(self) -> Any:
        """The object's own tokenizer, if it has one."""
        return getattr(self.given, "tokenizer", None)

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return its batch; a method that takes ``rows`` reads only those."""
        if "rows" in parameters_of(self.given.batch):
            return self.given.batch(step, batch_size, rows=rows)
        batch = self.given.batch(step, batch_size)
        return select_rows(batch, batch_size, self.batch_name(step), rows)

    def batch_name(self, step: int) -> str:
        """Name the batch with the call that returns it."""
        return f"batch {step} ({type(self.given).__name__}.batch(step={step}))"

    def fingerprint(self) -> str:
        """Return its own fingerprint, or one of its class."""
        return self._own("fingerprint", fingerprint_of(type(self.given).__qualname__))

    def describe(self) -> str:
        """Return its own description, or the name of its class."""
        return self._own("describe", type(self.given).__name__)

    def _own(self, method: str, otherwise: str) -> str:
        own = getattr(self.given, method, None)
        return str(own()) if callable(own) else otherwise


def as_data(
    given: Any, seed: int = 0, *, expected: Expected = _ANY, num_processes: int | None = None
) -> Data:
    """Return the data a user passes for training as `Data`.

    It may be Data; a source with ``len`` and ``rows(ids)``; a dict of arrays; a function of
    (step, batch_size) or (seed, step, batch_size), or one that returns an iterator; a dataset of
    Grain, PyTorch, Hugging Face or tf.data; a sequence of batches or samples; or an iterable. A
    bare iterable is refused for several processes, which might not all get the same batches.
    """
    if isinstance(given, Mixture):
        return _mixed(given, seed, training=expected.training)
    samples = isinstance(given, Samples)
    given = given.data if samples else given
    found = read_foreign(given, seed, expected, samples=samples)
    if found is None:
        found = _plain_data(given, seed, expected, samples=samples)
    if isinstance(found, IterableData) and (count := num_processes or process_count()) > 1:
        raise UserError(
            f"{found.name} cannot feed {count} processes",
            why="nothing guarantees that each of them gets the same batches",
            fix="give a dict of arrays, a dataset with a length and items, a list, or a function "
            "of (seed, step, batch_size)",
        )
    return found


def _mixed(given: Mixture, seed: int, *, training: bool) -> Data:
    """Return a mixture as `Data`: to train on, or to evaluate on each source."""
    sources = dict[str, Source]()
    for name, each in given.sources.items():
        found = as_data(each, seed)
        if not isinstance(found, SourceData):
            raise UserError(
                f"the source `{name}` cannot be mixed",
                why=f"rows cannot be read from {a_type(each)} by their number",
                fix="give ChatData, TextData, a dict of arrays, or a list of samples",
            )
        sources[name] = found.source
    if training:
        return MixtureData(sources, given.weights, seed)
    found = held_out_parts(sources, common_form(sources), seed)
    assert found is not None, "a mixture has sources"
    return found


def _plain_data(given: Any, seed: int, expected: Expected, *, samples: bool) -> Data:
    """Return data that belongs to no library as `Data`."""
    refuse_class(given)
    if callable(getattr(given, "batch", None)) and not hasattr(given, "__getitem__"):
        return given if isinstance(given, Data) else DataAdapter(given)
    if is_source(given):
        return SourceData(given, seed)
    refuse_wrong_data(given)
    if isinstance(given, Mapping):
        return SourceData(ArraySource(**given), seed)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        name = f"the {type(given).__name__}"
        if samples or (len(given) and expected.are_samples(given[0], name)):
            return SourceData(SampleSource(given), seed)
        return SequenceData(given)
    if isinstance(given, Iterable):
        return _iterable_data(given, expected, samples=samples)
    if callable(given):
        if not _required(given) and not is_batch_function(given):
            return _iterator_function(given, expected, samples=samples)
        return _function_data(given, seed)
    raise no_batches(given)


def is_batch_function(builder: Builder) -> bool:
    """Whether a builder itself returns batches: a function of ``step`` and ``batch_size``."""
    return not inspect.isclass(builder) and set(BATCH_PARAMETERS) <= set(parameters_of(builder))


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
        why=f"it returned {a_type(made)}, with neither batch() nor rows() and a length",
        fix="give it a method batch(self, step, batch_size) that returns a dict of arrays, or name "
        "a function of step and batch_size",
    )


def _iterable_data(given: Iterable[Any], expected: Expected, *, samples: bool) -> IterableData:
    read = IterableData(
        open=lambda _: iter(given),
        name=f"{a_type(given)}",
        once=isinstance(given, Iterator),
        length=len(given) if hasattr(given, "__len__") else None,  # pyright: ignore[reportArgumentType]
    )
    if inspect.isgenerator(given):
        name = given.__name__
        read.again = (
            f"give the function {name} itself, without (), which is then called for every pass"
            if name.isidentifier()
            else "give a function without parameters that returns the generator"
        )
    return read.with_elements(expected, samples=samples)


def _iterator_function(
    given: Callable[[], Any], expected: Expected, *, samples: bool
) -> IterableData:
    """Return the data of a function that returns a new iterator whenever it is called."""
    name = getattr(given, "__name__", type(given).__name__)

    def open_(_: int) -> Iterator[Any]:
        made = given()
        if isinstance(made, Mapping) or hasattr(made, "shape") or not isinstance(made, Iterable):
            raise UserError(
                f"the function {name} returns no batches",
                why=f"it takes no arguments and returned {a_type(made)}, not an iterator",
                fix="write a generator function, or a function of (step, batch_size)",
            )
        return iter(made)

    read = IterableData(open=open_, name=f"the function {name}", repeat=True)
    return read.with_elements(expected, samples=samples)


def _required(given: Callable[..., Any]) -> list[str]:
    return [name for name, p in parameters_of(given).items() if p.default is p.empty]


def _function_data(given: Callable[..., Any], seed: int) -> FunctionData:
    parameters = parameters_of(given)
    name = getattr(given, "__name__", type(given).__name__)
    if set(BATCH_PARAMETERS) <= set(parameters):
        with_seed = {"seed": seed} if "seed" in parameters else {}
        return FunctionData(partial(given, **with_seed), name)
    required = len(_required(given))
    if required == 3:
        return FunctionData(lambda step, batch_size: given(seed, step, batch_size), name)
    if required == 2 or (required == 1 and len(parameters) == 2):
        return FunctionData(lambda step, batch_size: given(step, batch_size), name)
    raise UserError(
        f"the function {name} cannot be asked for a batch",
        why=f"it takes {inspect.signature(given)}; the step and the batch size would be passed",
        fix="write a function of (step, batch_size), or of (seed, step, batch_size); parameters of "
        "these names may have others with defaults beside them",
    )
