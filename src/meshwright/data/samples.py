"""Samples: datasets of them as sources, and how they are stacked into a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from meshwright.data.contents import list_contents
from meshwright.data.fingerprints import fingerprint_of
from meshwright.errors import UserError


@dataclass(frozen=True)
class Samples:
    """Marks the elements of some data as samples, where they could also be batches.

    Attributes:
        data: a dataset, a list or an iterable of samples.
    """

    data: Any


@dataclass(frozen=True)
class SampleSource:
    """The samples of a dataset with ``len`` and ``dataset[number]``, read one by one.

    It is the user's code: if ``sequential``, one thread at a time reads it.
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
        """Return a fingerprint of the class, the size, and the contents of a list."""
        contents = list_contents(self.dataset)
        return fingerprint_of("samples", type(self.dataset).__name__, len(self), *contents)

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


def refuse_text_columns(dataset: Any) -> None:
    """Raise if columns of a Hugging Face dataset hold text, which no model can read."""
    features = dataset.features if isinstance(dataset.features, Mapping) else {}
    columns = [
        str(name)
        for name, feature in features.items()
        if getattr(feature, "dtype", "") in ("string", "large_string")
    ]
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


def stack_samples(samples: Sequence[Any], numbers: Sequence[int]) -> Any:
    """Return a batch with one row per sample, nested as they are; numbers are for messages."""
    read = [_flatten(sample, number) for sample, number in zip(samples, numbers, strict=True)]
    first, tree = read[0]
    for (leaves, own_tree), number in zip(read, numbers, strict=True):
        if own_tree != tree:
            raise UserError(
                f"sample {number} has other fields than sample {numbers[0]}",
                why=f"it has {_names(leaves)}, and sample {numbers[0]} has {_names(first)}",
                fix="give every sample the same fields",
            )
    arrays = [
        _stack(name, [leaves[at][1] for leaves, _ in read], numbers)
        for at, (name, _) in enumerate(first)
    ]
    return jax.tree.unflatten(tree, arrays)


def plain_tree(value: Any) -> Any:
    """Return a tree with dicts for other mappings, and arrays for lists of numbers."""
    if isinstance(value, Mapping):
        return {key: plain_tree(each) for key, each in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list):
        items = cast(list[Any], value)
        return np.asarray(items) if _is_numbers(items) else [plain_tree(each) for each in items]
    if type(value) is tuple:
        return tuple(plain_tree(each) for each in cast(tuple[Any, ...], value))
    return value


def leaf_shapes(element: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of an element by its path; a number has none."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(plain_tree(element))
    return {path_name(path, "sample"): tuple(getattr(leaf, "shape", ())) for path, leaf in leaves}


def _is_numbers(items: list[Any]) -> bool:
    """Whether a list is a vector or a matrix of numbers, and not a tuple of fields."""
    if items and all(isinstance(item, list) for item in items):
        return len({len(item) for item in items}) == 1 and all(map(_is_numbers, items))
    return bool(items) and all(isinstance(item, bool | int | float) for item in items)


def _flatten(sample: Any, number: int) -> tuple[list[tuple[str, Any]], Any]:
    if sample is None:
        raise UserError(f"sample {number} is None", fix="leave it out, or return its arrays")
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        plain_tree(sample), is_leaf=lambda value: value is None
    )
    return [(path_name(path, "sample"), leaf) for path, leaf in leaves], tree


def path_name(path: Any, whole: str = "batch") -> str:
    """Return the dotted name of an array; ``whole`` for one that is not inside of anything."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or whole


def _names(leaves: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(name for name, _ in leaves) or "none"


def _stack(name: str, values: Sequence[Any], numbers: Sequence[int]) -> NDArray[Any]:
    arrays = [_as_array(name, value, n) for value, n in zip(values, numbers, strict=True)]
    for array, number in zip(arrays, numbers, strict=True):
        if array.shape != arrays[0].shape:
            raise UserError(
                f"`{name}` of sample {number} has another shape than that of sample {numbers[0]}",
                why=f"{list(array.shape)} instead of {list(arrays[0].shape)}",
                fix="pad or crop every sample to one shape",
            )
    return np.stack(arrays)


def _as_array(name: str, value: Any, number: int) -> NDArray[Any]:
    plain = isinstance(value, bool | int | float | complex)
    array = to_numpy(value) if plain or hasattr(value, "__array__") else None
    if array is not None and array.dtype.kind not in "OSUTMmV":
        return array
    if array is not None and array.dtype.kind == "V" and jax.numpy.issubdtype(array.dtype, float):
        return array
    is_text = isinstance(value, str | bytes) or (array is not None and array.dtype.kind in "SUT")
    holds = "text" if is_text else f"of type {type(value).__name__}"
    if array is not None and not is_text:
        holds = f"an array of dtype {array.dtype}"
    raise UserError(
        f"`{name}` of sample {number} is {holds}, not a number or an array of numbers",
        why="devices compute with numbers",
        fix="turn it into integers or floats, or leave the field out",
    )


def to_numpy(value: Any) -> NDArray[Any]:
    """Return an array or a tensor of another library as a NumPy array, on the host."""
    try:
        return np.asarray(value)
    except Exception:
        # NumPy has no bfloat16 of its own; DLPack does.
        if not hasattr(value, "__dlpack__") or getattr(value, "requires_grad", False):
            raise
        return np.asarray(jax.dlpack.from_dlpack(value))
