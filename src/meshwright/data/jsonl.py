"""JSON Lines: one record per line, in plain or gzipped files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.records import RecordFiles
from meshwright.errors import UserError


@dataclass(frozen=True, kw_only=True)
class JsonLines(RecordFiles):
    """One record per line that is not empty."""

    endings = (".jsonl", ".ndjson", ".json", ".jsonl.gz")

    def read_file(self, file: Path) -> Iterator[tuple[str, bytes]]:
        """Yield the number and the content of each line."""
        opener: Any = gzip.open if file.suffix == ".gz" else open
        try:
            with opener(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{file}, line {number:,}", line
        except (OSError, EOFError) as error:
            raise UserError(f"cannot read {file}", why=str(error)) from error

    def parse(self, raw: bytes) -> Any:
        """Return the JSON value of a line."""
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ValueError(f"it is not JSON: {error}") from error
