"""Finding and opening the files that a data section names, with errors that say what is wrong."""

import glob
import mmap
import os
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import Setting, UserError, did_you_mean

RESIDENT_BYTES = 16 * 2**20
"""How much of a mapped file a process keeps in its memory before it releases it."""
TOUCHED_BYTES = 2**16
"""What the kernel maps around one address that is read."""


# NumPy's stub declares memmap's `__module__` to be "numpy", which no subclass elsewhere can be.
class MappedArray(np.memmap):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A memory-mapped array that pickles as a reference to its file, not as its content."""

    _touched: int = 0

    def release(self, places: int, count: int = 1) -> None:
        """Note that ``count`` numbers were read at each of so many places.

        From time to time the process releases what it has read, which stays in the system's page
        cache; otherwise random reads would add the whole file to the process's memory.
        """
        self._touched += places * (count * self.itemsize + TOUCHED_BYTES)
        if self._touched > RESIDENT_BYTES and isinstance(self.base, mmap.mmap):
            self._touched = 0
            if hasattr(mmap, "MADV_DONTNEED"):
                self.base.madvise(mmap.MADV_DONTNEED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to map the file again; a view of a part is pickled by value."""
        if isinstance(self.base, mmap.mmap):
            return map_array, (str(self.filename), self.dtype.str, self.offset, self.shape)
        return np.array(self, subok=False).__reduce_ex__(protocol)


def release(array: NDArray[Any], places: int, count: int = 1) -> None:
    """Call `MappedArray.release` if the array is memory-mapped."""
    if isinstance(array, MappedArray):
        array.release(places, count)


def map_array(path: str, dtype: Any, offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a file's numbers, memory-mapped."""
    if 0 in shape:
        return np.empty(shape, np.dtype(dtype))
    return MappedArray(path, dtype=np.dtype(dtype), mode="r", offset=offset, shape=shape)


def find_path(path: str, key: str = "data.path") -> Path:
    """Return a path, which must exist."""
    where = Path(path).expanduser()
    if where.exists():
        return where
    near = ""
    if where.parent.is_dir():
        near = did_you_mean(where.name, (other.name for other in where.parent.iterdir()))
    raise UserError(
        f"{Setting(key, path)} does not exist",
        why=f"looked in {Path.cwd()}",
        fix=near or f"check {Setting(key)}",
    )


def list_files(
    path: str | Sequence[str], endings: Iterable[str] = (), key: str = "data.path"
) -> list[Path]:
    """Return the files that a path names, in a fixed order.

    The path is a file; a folder, whose files with such endings are sorted by name, without hidden
    ones; a pattern such as ``data/*.jsonl``; or a list of these, in its own order.
    """
    if not isinstance(path, str):
        if not path:
            raise UserError(f"{Setting(key, path)} is empty", why="the list names no files")
        return [file for one in path for file in list_files(one, endings, key)]
    if any(sign in path for sign in "*?[") and not Path(path).expanduser().exists():
        matches = sorted(glob.glob(os.path.expanduser(path), recursive=True))
        if not matches:
            raise UserError(f"{Setting(key, path)} matches no file", why=f"looked in {Path.cwd()}")
        return [file for match in matches for file in _files_of(match, tuple(endings), key)]
    return _files_of(path, tuple(endings), key)


def _files_of(path: str, endings: tuple[str, ...], key: str) -> list[Path]:
    where = find_path(path, key)
    if not where.is_dir():
        return [where]
    files = sorted(
        file
        for file in where.rglob("*")
        if file.is_file()
        and (not endings or file.name.lower().endswith(endings))
        and not any(part.startswith(".") for part in file.relative_to(where).parts)
    )
    if not files:
        kinds = f" with the ending {' or '.join(endings)}" if endings else ""
        raise UserError(f"{Setting(key, path)} is empty", why=f"the folder has no files{kinds}")
    return files


def load_array(file: Path) -> Any:
    """Return the array of an .npy file, mapped; or the arrays of an .npz file by name."""
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        # NumPy reads the header; the numbers are mapped so that they can be pickled.
        header = np.load(file, mmap_mode="r", allow_pickle=False)
        if not header.size or not header.flags.c_contiguous:
            return np.asarray(header)
        return map_array(str(file), header.dtype.str, header.offset, header.shape)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"cannot read {file}",
            why=f"it is not a complete NumPy file: {error}",
            fix="write it with np.save or np.savez",
        ) from error
