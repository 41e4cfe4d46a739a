"""Finding and opening the files that a data section names, with errors that say what is wrong."""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import Setting, UserError, did_you_mean


# NumPy's stub declares memmap's `__module__` to be "numpy", which no subclass elsewhere can be.
class MappedArray(np.memmap):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A memory-mapped array that pickles as a reference to its file, not as its content."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to map the file again; a view of a part is pickled by value."""
        if isinstance(self.base, mmap.mmap):
            return map_array, (str(self.filename), self.dtype.str, self.offset, self.shape)
        return np.array(self, subok=False).__reduce_ex__(protocol)


def map_array(path: str, dtype: Any, offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a file's numbers, memory-mapped."""
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


def list_files(path: str, endings: Iterable[str] = (), key: str = "data.path") -> list[Path]:
    """Return the file, or the files of a folder sorted by name, except hidden ones."""
    where = find_path(path, key)
    if not where.is_dir():
        return [where]
    endings = tuple(endings)
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
