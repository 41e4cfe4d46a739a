"""The safetensors format: slices of tensors read alone, and files written tensor by tensor.

A file is the length of its header (8 bytes), the header as JSON, and the tensors one after another.
The package of the format reads it, and refuses files whose tensors overlap or leave gaps. It is
written here, because a file must be written without the whole model in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError, first_line

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
"""How much of two tensors is read at a time to compare them."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file; its number format is called as in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read(self, ranges: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Read the slice from start to stop along each dim, and no more than it."""
        # Opened for each slice, so that no more of the file stays mapped.
        with _open(self.file) as opened:
            if not self.shape:
                return opened.get_tensor(self.name)
            return opened.get_slice(self.name)[tuple(slice(*each) for each in ranges)]

    def equals(self, other: Tensor) -> bool:
        """Whether a tensor of the same shape has the same values."""
        row = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        rows = max(1, BLOCK_BYTES // max(1, row))
        inner = [(0, size) for size in self.shape[1:]]
        blocks = (
            [(start, min(start + rows, self.shape[0])), *inner]
            for start in range(0, self.shape[0], rows)
        )
        return all(np.array_equal(self.read(each), other.read(each)) for each in blocks)


_LFS_POINTER = b"version "
"""How the pointers begin that a clone without Git LFS has instead of large files."""


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, without reading them."""
    with _open(file) as opened:
        names = opened.keys()
        slices = {name: opened.get_slice(name) for name in names}
        return {
            name: Tensor(name, str(each.get_dtype()), tuple(each.get_shape()), file)
            for name, each in slices.items()
        }


@contextmanager
def _open(file: Path) -> Generator[Any]:
    """Open a file with the package of the format."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UserError(
            "reading weights needs the safetensors package", fix="pip install 'meshwright[hf]'"
        ) from error
    try:
        with file.open("rb") as opened:
            pointer = opened.read(_LENGTH_BYTES) == _LFS_POINTER
        if not pointer:
            with safe_open(file, "numpy") as found:
                yield found
                return
    except OSError as error:
        raise UserError(f"cannot read {file}", why=str(error)) from error
    except SafetensorError as error:
        raise UserError(
            f"{file} is not a complete safetensors file",
            why=f"it has {file.stat().st_size:,} bytes: {first_line(error)}",
            fix="download it again",
        ) from error
    raise UserError(
        f"{file} is not the file itself",
        why="it is a pointer of Git LFS to it",
        fix="run git lfs pull in its folder, or download it with hf download",
    )


def read_remarks(file: Path) -> dict[str, str]:
    """Return what a file says of itself besides its tensors."""
    with _open(file) as opened:
        return opened.metadata() or {}


def write_file(
    file: Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: str,
    arrays: Iterator[NDArray[Any]],
    **remarks: str,
) -> None:
    """Write a file one tensor at a time, in the order of the shapes; NumPy names the dtype."""
    target = DTYPES[DTYPE_NAMES[dtype]]
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **remarks}}
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
