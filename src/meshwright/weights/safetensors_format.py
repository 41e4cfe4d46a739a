"""The safetensors format: slices of tensors read alone, and files written tensor by tensor.

A file is the length of its header (8 bytes), the header as JSON, and the tensors one after another.
It is read here and not through its own package because a slice must not hold more than itself in
memory, and a file must be written without the whole model in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Number formats of weights, by their name in a header."""

DTYPE_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
"""The names in a header by NumPy's."""

BLOCK_BYTES = 16 * 2**20
"""How much of a tensor is read at a time, before what is not wanted is dropped."""

_LENGTH_BYTES = 8
_LARGEST_HEADER = 100 * 2**20
_ALIGNMENT = 8


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        name: its name.
        dtype: its number format, as in the header.
        shape: its dims.
        file: the file.
        start: where in the file it begins, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read(self, ranges: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Read the slice from start to stop along each dim; only whole rows of dim 0 are read."""
        dtype = DTYPES[self.dtype]
        if not self.shape:
            return np.fromfile(self.file, dtype, 1, offset=self.start).reshape(())
        (first, last), *inner = ranges
        columns = tuple(slice(*each) for each in inner)
        row = math.prod(self.shape[1:])
        found = np.empty([stop - start for start, stop in ranges], dtype)
        rows = max(1, BLOCK_BYTES // max(1, row * dtype.itemsize))
        with self.file.open("rb") as file:
            file.seek(self.start + first * row * dtype.itemsize)
            for begin in range(first, last, rows):
                count = min(rows, last - begin)
                block = np.fromfile(file, dtype, count * row).reshape(count, *self.shape[1:])
                found[begin - first : begin - first + count] = block[(slice(None), *columns)]
        return found


_LFS_POINTER = b"version "
"""How the pointers begin that a clone without Git LFS has instead of large files."""


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, without reading them."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(_LENGTH_BYTES)
            if start == _LFS_POINTER:
                raise UserError(
                    f"{file} is not the file itself",
                    why="it is a pointer of Git LFS to it",
                    fix="run git lfs pull in its folder, or download it with hf download",
                )
            length = int.from_bytes(start, "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LARGEST_HEADER):
                raise _damaged(file, f"it has {size:,} bytes, and its header would have {length:,}")
            header = json.loads(opened.read(length))
        begin = _LENGTH_BYTES + length
        header.pop("__metadata__", None)
        ends = {name: begin + entry["data_offsets"][1] for name, entry in header.items()}
        tensors = {name: _tensor(name, entry, file, begin) for name, entry in header.items()}
    except OSError as error:
        raise UserError(f"cannot read {file}", why=str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged(file, "its header cannot be read") from error
    needed = max(ends.values(), default=begin)
    if size < needed:
        raise _damaged(file, f"it has {size:,} bytes, and its header lists {needed:,}")
    return tensors


def write_file(
    file: Path, shapes: Mapping[str, Sequence[int]], dtype: str, arrays: Iterator[NDArray[Any]]
) -> None:
    """Write a file, one tensor at a time.

    Args:
        file: the file to write.
        shapes: the shapes of its tensors, by name.
        dtype: the number format of all of them, as NumPy names it.
        arrays: the tensors, in the same order.
    """
    target = DTYPES[DTYPE_NAMES[dtype]]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * target.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for array in arrays:
            np.ascontiguousarray(array, target).tofile(opened)


def _tensor(name: str, entry: Mapping[str, Any], file: Path, begin: int) -> Tensor:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _damaged(file, f"`{name}` has {end - start:,} bytes for {dtype} {list(shape)}")
    return Tensor(name, dtype, shape, file, begin + start)


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file} is not a complete safetensors file", why=why, fix="download it again")
