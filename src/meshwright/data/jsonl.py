"""JSON Lines: one record per line, in plain or gzipped files."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.data.documents import Position
from meshwright.data.records import RawBlock, RecordFiles
from meshwright.errors import UserError

BLOCK_BYTES = 2**20
"""Lines that are read at a time have this many bytes together."""


@dataclass(frozen=True, kw_only=True)
class JsonLines(RecordFiles):
    """One record per line that is not empty."""

    endings = (".jsonl", ".ndjson", ".json", ".jsonl.gz")

    unit = "line"

    def read_file(self, file: Path, start: Position) -> Iterator[RawBlock]:
        """Yield some lines at a time; a position is the byte and the number of the next line."""
        place, number = start or (0, 1)
        try:
            with open(file, "rb") as raw, _plain(file, raw) as content:
                size = max(os.fstat(raw.fileno()).st_size, 1)
                content.seek(place)
                while lines := content.readlines(BLOCK_BYTES):
                    numbered = enumerate(lines, start=number)
                    records = [(count, line) for count, line in numbered if not line.isspace()]
                    place += sum(map(len, lines))
                    number += len(lines)
                    yield RawBlock(records, (place, number), raw.tell() / size)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read {file}", why=str(error)) from error

    def parse(self, raw: bytes) -> Any:
        """Return the JSON value of a line."""
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from error


def _plain(file: Path, raw: BinaryIO) -> AbstractContextManager[Any]:
    return gzip.open(raw) if file.suffix == ".gz" else nullcontext(raw)
