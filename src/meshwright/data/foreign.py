"""Datasets of other libraries, recognized by their methods: Grain, PyTorch, Hugging Face, tf.data.

None of them is imported here: a user who passes a dataset has imported its library.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshwright.data.elements import Expected
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.indexed_data import ENDLESS, SequenceData, SourceData
from meshwright.data.protocols import Data, Rows
from meshwright.data.samples import ColumnSource, SampleSource, refuse_text_columns, stack_samples
from meshwright.data.streams import READ_AGAIN, IterableData
from meshwright.errors import UserError
from meshwright.text.units import a_type

_OF_LOADERS = ("dataset", "batch_size", "collate_fn", "__iter__")
"""What PyTorch's `DataLoader` is recognized by."""


def read_foreign(given: Any, seed: int, expected: Expected, *, samples: bool) -> Data | None:
    """Return a dataset of another library as `Data`; None if it is not one.

    The seed is for orders that Meshwright chooses; ``samples`` is what the user says they are.
    """
    if "grain" in sys.modules and (found := _grain(given, expected, samples=samples)) is not None:
        return found
    if all(hasattr(given, name) for name in _OF_LOADERS):
        return _loader(given, expected)
    if isinstance(given, Mapping) and given and all(map(_is_table, given.values())):
        raise _several_splits(given)
    if _is_table(given):
        refuse_text_columns(given)
        if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
            return SourceData(ColumnSource(given), seed)
        return _stream(given, expected, samples=samples)
    if hasattr(given, "as_numpy_iterator") and hasattr(given, "element_spec"):
        return _tensorflow(given, expected, samples=samples)
    classes = type(given).__mro__
    if any(each.__module__.startswith("torch.utils.data") for each in classes):
        # A torch IterableDataset inherits a __getitem__ that always raises.
        iterable = any(each.__name__ == "IterableDataset" for each in classes)
        if hasattr(given, "__len__") and not iterable:
            return SourceData(SampleSource(given), seed)
        return _stream(given, expected, samples=samples)
    return None


@dataclass(frozen=True)
class MapSamples(Data):
    """Samples of a Grain `MapDataset`, in the order and with the shuffling it was given.

    Items beyond its length are those of further epochs.
    """

    dataset: Any

    @property
    def num_samples(self) -> int | None:
        """Samples of one pass; None if it is repeated without end."""
        return None if len(self.dataset) >= ENDLESS else len(self.dataset)

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> Any:
        """Return the samples of one step, or these rows of them, stacked."""
        places = np.arange(batch_size) if rows is None else rows
        numbers = (step * batch_size + places).tolist()
        samples = [self.dataset[number] for number in numbers]
        if any(sample is None for sample in samples):
            raise _filtered()
        return stack_samples(samples, numbers)

    def fingerprint(self) -> str:
        """Return a fingerprint of the number of samples."""
        return fingerprint_of("grain", len(self.dataset))

    def describe(self) -> str:
        """Return the number of samples in words."""
        count = "endless" if self.num_samples is None else f"{self.num_samples:,}"
        return f"Grain MapDataset, {count} samples"


def _open_epoch(dataset: Any, epoch: int) -> Iterator[Any]:
    """Iterate over a dataset again, after setting its epoch if it has one."""
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)
    return iter(dataset)


def _open_loader(loader: Any, epoch: int) -> Iterator[Any]:
    """Iterate over a PyTorch `DataLoader`; lists of tensors become tuples, as its samples are."""
    return (tuple(batch) if type(batch) is list else batch for batch in _open_epoch(loader, epoch))


def _grain(given: Any, expected: Expected, *, samples: bool) -> Data | None:
    import grain

    if isinstance(given, grain.MapDataset):
        return _grain_map(given, expected, samples=samples)
    if isinstance(given, grain.IterDataset | grain.DatasetIterator | grain.DataLoader):
        once = isinstance(given, grain.DatasetIterator)
        again = "give the dataset instead of its iterator"
        opener = (lambda _: given) if once else (lambda _: iter(given))
        return _stream(given, expected, opener, samples=samples, once=once, again=again)
    return None


def _grain_map(given: Any, expected: Expected, *, samples: bool) -> Data:
    if not len(given):
        return SequenceData(given)
    first = given[0]
    if first is None:
        raise _filtered()
    if samples or expected.are_samples(first, "the Grain MapDataset"):
        return MapSamples(given)
    return SequenceData(given, cycle=expected.training, own_epochs=True)


def _loader(given: Any, expected: Expected) -> Data:
    size = given.batch_size
    if size is None:
        return _stream(given, expected)
    if expected.batch_size not in (None, size):
        raise UserError(
            f"the DataLoader makes batches of {size}, and batch_size={expected.batch_size}",
            fix=f"write DataLoader(…, batch_size={expected.batch_size}), and leave out batch_size",
        )
    read = _read(given, partial(_open_loader, given))
    read.length = _length(given)
    shuffled = type(getattr(given, "sampler", None)).__name__ == "RandomSampler"
    if shuffled and getattr(given, "generator", None) is None:
        read.order = (
            "the DataLoader shuffles with PyTorch's random state, which checkpoints do not hold: "
            "a resumed run continues with another order. fit(loader.dataset, "
            f"batch_size={size}) resumes sample for sample"
        )
    return read


def _tensorflow(given: Any, expected: Expected, *, samples: bool) -> Data:
    read = _stream(given, expected, lambda _: iter(given.as_numpy_iterator()), samples=samples)
    try:
        cardinality = int(given.cardinality())
    except (AttributeError, TypeError, ValueError):
        cardinality = -2
    # TensorFlow has -1 for an endless dataset, and -2 for one of unknown length.
    read.length = cardinality if cardinality >= 0 else None
    return read


def _stream(
    given: Any, expected: Expected, opener: Any = None, *, samples: bool = False, **how: Any
) -> IterableData:
    read = _read(given, opener or partial(_open_epoch, given), **how)
    return read.with_elements(expected, samples=samples)


def _read(given: Any, opener: Any, *, once: bool = False, again: str = READ_AGAIN) -> IterableData:
    name = f"the {type(given).__name__}"
    return IterableData(open=opener, name=name, once=once, repeat=not once, again=again)


def _is_table(given: Any) -> bool:
    """Whether it is a Hugging Face dataset, in memory or streamed."""
    return hasattr(given, "column_names") and hasattr(given, "features")


def _length(given: Any) -> int | None:
    try:
        return len(given)
    except (TypeError, NotImplementedError):
        return None


def _several_splits(given: Mapping[Any, Any]) -> UserError:
    names = list(map(str, given))
    chosen = "train" if "train" in names else names[0]
    return UserError(
        f"the data are {a_type(given)} of several splits",
        why=f"it has {', '.join(names)}",
        fix=f'choose one: data["{chosen}"]',
    )


def _filtered() -> UserError:
    return UserError(
        "the Grain MapDataset has indices without a sample",
        why="filter leaves them out by returning None, so a step could not be complete",
        fix="write data.to_iter_dataset(), which skips them",
    )
