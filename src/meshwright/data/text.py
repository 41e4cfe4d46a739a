"""Text as bytes: files of the user's, or the Python standard library's own source."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError

CORPUS_BYTES = 16 * 2**20
"""How much of the standard library is read: enough for a demonstration, quick to load."""


class TextSource:
    """Consecutive rows of bytes, each one token longer than the sequence so targets are inside.

    Attributes:
        sequence_length: tokens the model sees per row.
    """

    vocab_size = 256

    def __init__(self, *, sequence_length: int, path: str | None = None) -> None:
        self.sequence_length = sequence_length
        self._bytes = _read(path)
        if len(self) < 1:
            raise UserError(
                f"data.path={path} is too short",
                why=f"it has {self._bytes.size} bytes and one row takes {sequence_length + 1}",
                fix="give a longer text, or a smaller data.sequence_length",
            )

    def __len__(self) -> int:
        return (self._bytes.size - 1) // self.sequence_length

    def rows(self, ids: NDArray[np.int64]) -> dict[str, NDArray[np.int32]]:
        """Return the rows with these ids: ``tokens`` of shape [len(ids), sequence_length + 1]."""
        starts = ids[:, None] * self.sequence_length
        places = starts + np.arange(self.sequence_length + 1)
        return {"tokens": self._bytes[places].astype(np.int32)}


def _read(path: str | None) -> NDArray[np.uint8]:
    if path is None:
        return _standard_library()
    found = Path(path)
    if not found.exists():
        raise UserError(f"data.path={path} does not exist", why=f"looked in {Path.cwd()}")
    files = sorted(f for f in found.rglob("*") if f.is_file()) if found.is_dir() else [found]
    return np.frombuffer(b"\n".join(f.read_bytes() for f in files), np.uint8)


def _standard_library() -> NDArray[np.uint8]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    total = 0
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" in file.parts or total >= CORPUS_BYTES:
            continue
        parts.append(file.read_bytes())
        total += len(parts[-1])
    return np.frombuffer(b"\n".join(parts), np.uint8)
