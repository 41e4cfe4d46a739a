"""Datasets of samples by number as sources: anything with a length and items, and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.stack import stack_samples
from meshwright.errors import UserError


@dataclass(frozen=True)
class Samples:
    """Says that the elements of some data are samples, where they could be batches as well.

    Attributes:
        data: a dataset, a list or an iterable of samples.
    """

    data: Any


@dataclass(frozen=True)
class SampleSource:
    """The samples of a dataset with a length and items, which are read one by one.

    Attributes:
        dataset: a list, or an object with ``len(dataset)`` and ``dataset[number]``.
        sequential: makes the loader read in one thread, because the dataset is the user's code.
    """

    dataset: Any
    sequential: bool = True

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, ids: NDArray[np.int64]) -> Any:
        """Return the samples with these numbers, stacked."""
        numbers = ids.tolist()
        return stack_samples([self.dataset[number] for number in numbers], numbers)

    def fingerprint(self) -> str:
        """Return a fingerprint of the class and the size; contents may be random."""
        return fingerprint_of("samples", type(self.dataset).__name__, len(self))

    def describe(self) -> str:
        """Return the class of the dataset and its size."""
        return f"{type(self.dataset).__name__}, {len(self):,} samples"


@dataclass(frozen=True)
class ColumnSource(SampleSource):
    """The rows of a Hugging Face dataset, which are read several at a time, as columns."""

    def rows(self, ids: NDArray[np.int64]) -> Any:
        """Return these rows as one array per column."""
        columns: Mapping[str, Any] = self.dataset[ids.tolist()]
        return {name: _column(name, values, ids) for name, values in columns.items()}


def text_columns(dataset: Any) -> list[str]:
    """Return the columns of a Hugging Face dataset that hold text."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping):
        return []
    return [
        str(name)
        for name, feature in features.items()
        if getattr(feature, "dtype", "") in ("string", "large_string")
    ]


def refuse_text_columns(dataset: Any) -> None:
    """Raise if columns of a Hugging Face dataset hold text, which no model can read."""
    columns = text_columns(dataset)
    if columns:
        raise UserError(
            f"the column `{columns[0]}` of the dataset holds text"
            if len(columns) == 1
            else f"the columns {', '.join(f'`{name}`' for name in columns)} of the dataset hold "
            "text",
            why="devices compute with numbers",
            fix=f"write data.remove_columns({columns}), after turning the text into numbers with "
            "data.map(…) if the model needs it",
        )


def _column(name: str, values: Any, ids: NDArray[np.int64]) -> Any:
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        return values
    return stack_samples([{name: value} for value in values], ids.tolist())[name]
