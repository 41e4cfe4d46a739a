"""Samples in arrays: in memory, or read from .npy and .npz files."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.contents import array_contents
from meshwright.data.files import find_path, load_array
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import HostBatch
from meshwright.data.samples import to_numpy
from meshwright.errors import UserError, first_line
from meshwright.trees import check_num_samples


class ArraySource:
    """Samples in arrays that share dim 0: ``ArraySource(x=images, y=labels)``."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays: dict[str, Any] = {
            name: array if isinstance(array, np.ndarray) else _as_array(name, array)
            for name, array in arrays.items()
        }
        check_arrays(self.arrays)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return these samples of every array."""
        return {name: np.asarray(array[ids]) for name, array in self.arrays.items()}

    def fingerprint(self) -> str:
        """Return a fingerprint of the names, shapes, dtypes and contents."""
        contents = array_contents(list(self.arrays.values()))
        facts = [
            (name, array.shape, str(array.dtype), content)
            for (name, array), content in zip(self.arrays.items(), contents, strict=True)
        ]
        return fingerprint_of("arrays", facts)

    def describe(self) -> str:
        """Return the number of samples and the arrays in one line."""
        listing = ", ".join(
            f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in self.arrays.items()
        )
        return f"{len(self):,} samples of {listing}"


def array_files(*, path: str) -> ArraySource:
    """Return the arrays of an .npz file, or of a folder with one .npy file for each."""
    return ArraySource(**read_arrays(path))


def read_arrays(path: str) -> dict[str, Any]:
    """Return the arrays of a file or folder by name; .npy files are memory-mapped."""
    where = find_path(path)
    if where.is_dir():
        return {file.stem: load_array(file) for file in sorted(where.glob("*.npy"))}
    loaded = load_array(where)
    return loaded if isinstance(loaded, dict) else {Path(where).stem: loaded}


def _as_array(name: str, values: Any) -> NDArray[Any]:
    try:
        return to_numpy(values)
    except Exception as error:
        # Lists of different lengths, or a tensor of a library that cannot convert it.
        raise UserError(
            f"`{name}` is not an array of samples",
            why=first_line(error),
            fix="pad its samples to one shape, and give a NumPy array",
        ) from error


def check_arrays(arrays: dict[str, Any]) -> None:
    """Refuse arrays that do not hold samples, are empty, or differ in their number of samples."""
    if not arrays:
        raise UserError("there are no arrays", fix="name at least one, such as x=…")
    for name, array in arrays.items():
        if array.ndim == 0 or array.dtype.kind not in "biufc":
            raise UserError(
                f"`{name}` is not an array of samples",
                why=f"its dtype is {array.dtype} and its shape {array.shape}",
                fix="give numbers, with the sample as dim 0",
            )
    check_num_samples({name: len(array) for name, array in arrays.items()}, "the dataset")
