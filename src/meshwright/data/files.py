"""Finding and opening the files a data section names, and telling what is wrong with them."""

from __future__ import annotations

import mmap
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError, did_you_mean

SAMPLED_BYTES = 2**16
"""How much of an array's beginning, middle and end stands for its content in a fingerprint."""


# NumPy's stub declares memmap's `__module__` to be "numpy", which no subclass elsewhere can be.
class MappedArray(np.memmap):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A mapped array that another process opens again instead of receiving its content."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to open it again; a part of it travels as numbers."""
        if isinstance(self.base, mmap.mmap):
            return map_array, (str(self.filename), self.dtype.str, self.offset, self.shape)
        return np.array(self, subok=False).__reduce_ex__(protocol)


def map_array(path: str, dtype: Any, offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a file's numbers without reading them."""
    return MappedArray(path, dtype=np.dtype(dtype), mode="r", offset=offset, shape=shape)


def find_path(path: str, key: str = "data.path") -> Path:
    """Return a path that exists."""
    found = Path(path).expanduser()
    if found.exists():
        return found
    near = ""
    if found.parent.is_dir():
        near = did_you_mean(found.name, (other.name for other in found.parent.iterdir()))
    raise UserError(
        f"{key}={path} does not exist", why=f"looked in {Path.cwd()}", fix=near or f"check {key}"
    )


def list_files(path: str, endings: Iterable[str] = (), key: str = "data.path") -> list[Path]:
    """Return the file, or the files of a folder in the order of their names, hidden ones not."""
    found = find_path(path, key)
    if not found.is_dir():
        return [found]
    endings = tuple(endings)
    files = sorted(
        file
        for file in found.rglob("*")
        if file.is_file()
        and (not endings or file.name.lower().endswith(endings))
        and not any(part.startswith(".") for part in file.relative_to(found).parts)
    )
    if not files:
        kinds = f" with the ending {' or '.join(endings)}" if endings else ""
        raise UserError(f"{key}={path} is empty", why=f"the folder has no files{kinds}")
    return files


def read_bytes(file: Path) -> bytes:
    """Return a file's content."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}", why=str(error)) from error


def load_array(file: Path) -> Any:
    """Return the array of an .npy file, mapped; or the arrays of an .npz file by name."""
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        # NumPy reads the header; the numbers are mapped in a way that survives pickling.
        header = np.load(file, mmap_mode="r", allow_pickle=False)
        if not header.size or not header.flags.c_contiguous:
            return np.asarray(header)
        return map_array(str(file), header.dtype.str, header.offset, header.shape)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"cannot read {file}",
            why=f"it is no NumPy file that is whole: {error}",
            fix="write it with np.save or np.savez",
        ) from error


def content_sample(array: NDArray[Any]) -> int:
    """Return a checksum of an array's beginning, middle and end, the same on every machine."""
    flat = array.reshape(-1)
    count = max(SAMPLED_BYTES // max(flat.itemsize, 1), 1)
    middle = max((flat.size - count) // 2, 0)
    parts = [flat[:count], flat[middle : middle + count], flat[-count:]]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(np.ascontiguousarray(part).tobytes(), checksum)
    return checksum
