"""ArrayRecord files: records of bytes that hold JSON, text or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.data.records import RecordFiles
from meshwright.data.tokens import TokenType
from meshwright.errors import UserError

Content = Literal["json", "text", "tokens"]
"""What the bytes of a record hold: a JSON object, UTF-8 text, or a sequence of token ids."""


@dataclass(frozen=True, kw_only=True)
class ArrayRecords(RecordFiles):
    """One record per entry of an ArrayRecord file.

    Attributes:
        content: what the bytes of a record hold: json, text or tokens.
        dtype: type of the token ids.
    """

    content: Content = "json"
    dtype: TokenType = "uint16"

    endings = (".array_record", ".arrayrecord")

    def read_file(self, file: Path) -> Iterator[tuple[str, bytes]]:
        """Yield the number and the bytes of each record."""
        from grain.sources import ArrayRecordDataSource

        try:
            opened: Any = ArrayRecordDataSource([str(file)])
            with opened as source:
                for number in range(len(source)):
                    yield f"{file}, record {number:,}", source[number]
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cannot read {file}", why=f"it is not a complete ArrayRecord file: {error}"
            ) from error

    def parse(self, raw: bytes) -> Any:
        """Return the fields of a record; text and tokens are its only field."""
        if self.content == "tokens":
            return {self.field: np.frombuffer(raw, self.dtype)}
        try:
            return json.loads(raw) if self.content == "json" else {self.field: raw.decode()}
        except ValueError as error:
            raise ValueError(f"it is not {self.content}: {error}") from error
