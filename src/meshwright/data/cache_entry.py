"""An entry of the cache: a folder of flat arrays that is complete or not there at all."""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import map_array
from meshwright.text.units import human_bytes

FORMAT = 1
CONTENT, PROGRESS = "entry.json", "progress.json"
CHECKED_PIECES, PIECE_BYTES = 64, 2**20
"""Pieces of an array, spread evenly over it, that enter its checksum; of a small array, all."""


class Damaged(Exception):
    """An entry differs from what was written."""


@dataclass(frozen=True)
class Entry:
    """A complete entry: types and lengths of its arrays, and what its writer stored about it."""

    folder: Path
    facts: dict[str, Any]
    dtypes: dict[str, str]
    lengths: dict[str, int]

    def array(self, name: str) -> NDArray[Any]:
        """Return an array, memory-mapped."""
        path = str(self.folder / f"{name}.bin")
        return map_array(path, self.dtypes[name], 0, (self.lengths[name],))


def open_entry(folder: Path) -> Entry | None:
    """Return a complete entry, None if there is none; one that is damaged raises `Damaged`."""
    try:
        text = (folder / CONTENT).read_bytes()
    except FileNotFoundError:
        if folder.exists():
            raise Damaged(f"{folder / CONTENT} is missing") from None
        return None
    try:
        content = json.loads(text)
        whole = content.pop("checksum") == _checksum_of(content)
        arrays = dict(content["arrays"])
    except (ValueError, KeyError, TypeError, AttributeError):
        whole, content, arrays = False, {}, {}
    if not whole:
        raise Damaged(f"{folder / CONTENT} differs from what was written")
    for name, expected in arrays.items():
        _check(folder / f"{name}.bin", expected)
    return Entry(
        folder,
        content["facts"],
        {name: array["dtype"] for name, array in arrays.items()},
        {name: array["length"] for name, array in arrays.items()},
    )


def spot_checksum(file: Path) -> int:
    """Return a checksum of up to 64 MiB of a file, spread evenly over it."""
    size = file.stat().st_size
    last = max(size - PIECE_BYTES, 0)
    spread = np.linspace(0, last, CHECKED_PIECES, dtype=np.int64).tolist()
    whole = size <= CHECKED_PIECES * PIECE_BYTES
    checksum = 0
    with open(file, "rb", buffering=0) as content:
        for start in range(0, size, PIECE_BYTES) if whole else spread:
            checksum = zlib.crc32(os.pread(content.fileno(), PIECE_BYTES, start), checksum)
    return checksum


class PartialEntry:
    """An entry that is being written beside its final place, and that another process may finish.

    ``progress`` is what a process that did not finish noted last; empty at the start.
    """

    def __init__(self, folder: Path, dtypes: Mapping[str, Any]) -> None:
        self.folder = folder
        self.progress: dict[str, Any] = {}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        folder.mkdir(parents=True, exist_ok=True)
        self.lengths = self._read_progress()
        # What was written after the last note is rewritten.
        self._files: dict[str, BinaryIO] = {}
        for name, dtype in self._dtypes.items():
            file = open(folder / f"{name}.bin", "ab", buffering=2**20)  # noqa: SIM115
            file.truncate(self.lengths[name] * dtype.itemsize)
            self._files[name] = file

    def append(self, name: str, values: NDArray[Any]) -> None:
        """Add numbers to the end of an array."""
        values = np.ascontiguousarray(values, self._dtypes[name])
        self._files[name].write(values.data.cast("B") if values.size else b"")
        self.lengths[name] += values.size

    @property
    def size(self) -> int:
        """Bytes of all arrays so far."""
        return sum(self.lengths[name] * dtype.itemsize for name, dtype in self._dtypes.items())

    def note(self, progress: Mapping[str, Any]) -> None:
        """Save what is written so far, with what is needed to continue from here."""
        self._flush()
        _write_durably(self.folder / PROGRESS, {"progress": {**progress}, "lengths": self.lengths})

    def commit(self, final: Path, facts: Mapping[str, Any]) -> None:
        """Make the entry complete, all at once."""
        self._flush()
        self.close()
        (self.folder / PROGRESS).unlink(missing_ok=True)
        content = {
            "format": FORMAT,
            "facts": dict(facts),
            "arrays": {
                name: {
                    "dtype": dtype.str,
                    "length": self.lengths[name],
                    "checksum": spot_checksum(self.folder / f"{name}.bin"),
                }
                for name, dtype in self._dtypes.items()
            },
        }
        _write_durably(self.folder / CONTENT, content)
        try:
            self.folder.rename(final)
        except OSError:
            if not final.exists():
                raise
            # Without locks, another process may have written the same.
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Close the files; what they still hold is lost if the disk is full."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _read_progress(self) -> dict[str, int]:
        """Read the last note, if it can be trusted; return the lengths of arrays to keep."""
        try:
            noted = json.loads((self.folder / PROGRESS).read_text())
            checksum, lengths = noted.pop("checksum"), dict(noted["lengths"])
            kept = checksum == _checksum_of(noted) and all(
                (self.folder / f"{name}.bin").stat().st_size >= lengths[name] * dtype.itemsize
                for name, dtype in self._dtypes.items()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            kept, noted, lengths = False, {}, {}
        if not kept:
            return dict.fromkeys(self._dtypes, 0)
        self.progress = noted["progress"]
        return {name: int(lengths[name]) for name in self._dtypes}


def _check(file: Path, expected: Mapping[str, Any]) -> None:
    size = expected["length"] * np.dtype(expected["dtype"]).itemsize
    try:
        found = file.stat().st_size
    except FileNotFoundError:
        raise Damaged(f"{file} is missing") from None
    if found != size:
        raise Damaged(f"{file} has {human_bytes(found)} instead of {human_bytes(size)}")
    if spot_checksum(file) != expected["checksum"]:
        raise Damaged(f"{file} does not match its checksum")


def _checksum_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _write_durably(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that after a crash has either its old or its new content, and its checksum."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        json.dump({**content, "checksum": _checksum_of(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
