"""ArrayRecord files: records of bytes that hold JSON, text or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.data.corrupt import OnCorrupt
from meshwright.data.documents import Packing
from meshwright.data.feed import Source
from meshwright.data.files import list_files
from meshwright.data.records import RecordSettings, record_source
from meshwright.data.tokens import TokenType
from meshwright.errors import UserError

ENDINGS = (".array_record", ".arrayrecord")

Content = Literal["json", "text", "tokens"]
"""What the bytes of a record are: a JSON object, UTF-8, or token ids one after the other."""


@dataclass(frozen=True)
class ArrayRecords:
    """The records of some files."""

    files: list[Path]
    content: Content
    dtype: TokenType
    field: str

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for file in self.files:
            yield from self._records(file)

    def _records(self, file: Path) -> Iterator[tuple[str, bytes]]:
        from grain.sources import ArrayRecordDataSource

        try:
            opened: Any = ArrayRecordDataSource([str(file)])
            with opened as source:
                for number in range(len(source)):
                    yield f"{file}, record {number:,}", source[number]
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cannot read {file}", why=f"it is no ArrayRecord file that is whole: {error}"
            ) from error

    def parse(self, raw: bytes) -> Any:
        """Return the fields of a record; text and tokens are its only one."""
        if self.content == "tokens":
            return {self.field: np.frombuffer(raw, self.dtype)}
        try:
            return json.loads(raw) if self.content == "json" else {self.field: raw.decode()}
        except ValueError as error:
            raise ValueError(f"it is no {self.content}: {error}") from error


def array_record_source(
    *,
    path: str,
    content: Content = "json",
    dtype: TokenType = "uint16",
    field: str = "text",
    fields: list[str] | None = None,
    sequence_length: int | None = None,
    tokenizer: str | None = None,
    packing: Packing = "documents",
    vocab_size: int | None = None,
    on_corrupt: OnCorrupt = "stop",
) -> Source:
    """Return the records of an .array_record file, or of all in a folder.

    Args:
        path: a file or folder.
        content: what the bytes of a record are: json, text or tokens.
        dtype: of token ids.
        field: in JSON, the field with a text, or with a list of token ids.
        fields: instead, fields of numbers; each becomes an array of the batch.
        sequence_length: tokens the model sees per row.
        tokenizer: a ``tokenizers`` JSON file; without one, every byte is a token.
        packing: whether rows are cut from all records one after the other, or records stay apart.
        vocab_size: tokens of the model, which must suffice.
        on_corrupt: what to do about a record that cannot be read.
    """
    settings = RecordSettings(
        name=f"data.path={path}",
        field=field,
        fields=fields,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        packing=packing,
        vocab_size=vocab_size,
        on_corrupt=on_corrupt,
    )
    return record_source(ArrayRecords(list_files(path, ENDINGS), content, dtype, field), settings)
