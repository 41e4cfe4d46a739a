"""ArrayRecord files: records of bytes that hold JSON, text or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.data.documents import Position
from meshwright.data.records import RawBlock, RecordFiles
from meshwright.data.tokens import TokenType
from meshwright.errors import UserError

Content = Literal["json", "text", "tokens"]
"""What the bytes of a record hold: a JSON object, UTF-8 text, or a sequence of token ids."""

BLOCK_RECORDS = 64
"""Records that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class ArrayRecords(RecordFiles):
    """One record per entry of an ArrayRecord file: json, text, or token ids of some type."""

    content: Content = "json"
    dtype: TokenType = "uint16"

    endings = (".array_record", ".arrayrecord")

    unit = "record"

    def read_file(self, file: Path, start: Position) -> Iterator[RawBlock]:
        """Yield some records at a time; a position is the number of the next."""
        from grain.sources import ArrayRecordDataSource

        (first,) = start or (0,)
        try:
            opened: Any = ArrayRecordDataSource([str(file)])
            with opened as source:
                for begin in range(first, len(source), BLOCK_RECORDS):
                    end = min(begin + BLOCK_RECORDS, len(source))
                    records = [(number, source[number]) for number in range(begin, end)]
                    yield RawBlock(records, (end,), end / len(source))
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cannot read {file}", why=f"it is not a complete ArrayRecord file: {error}"
            ) from error

    def format_settings(self) -> tuple[Any, ...]:
        """Return what the bytes of a record mean."""
        return self.content, self.dtype

    def parse(self, raw: bytes) -> Any:
        """Return the fields of a record; text and tokens are its only field."""
        if self.content == "tokens":
            return {self.field: np.frombuffer(raw, self.dtype)}
        try:
            return json.loads(raw) if self.content == "json" else {self.field: raw.decode()}
        except ValueError as error:
            raise ValueError(f"it is not {self.content}: {error}") from error
