"""JSON Lines: one record per line, in plain or gzipped files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.corrupt import OnCorrupt
from meshwright.data.documents import Packing
from meshwright.data.feed import Source
from meshwright.data.files import list_files
from meshwright.data.records import RecordSettings, record_source
from meshwright.errors import UserError

ENDINGS = (".jsonl", ".ndjson", ".json", ".jsonl.gz")


@dataclass(frozen=True)
class JsonLines:
    """The lines of some files; empty ones are no records."""

    files: list[Path]

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for file in self.files:
            yield from self._lines(file)

    def _lines(self, file: Path) -> Iterator[tuple[str, bytes]]:
        opener: Any = gzip.open if file.suffix == ".gz" else open
        try:
            with opener(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{file}, line {number:,}", line
        except (OSError, EOFError) as error:
            raise UserError(f"cannot read {file}", why=str(error)) from error

    def parse(self, raw: bytes) -> Any:
        """Return the fields of a line."""
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ValueError(f"it is no JSON: {error}") from error


def jsonl_source(
    *,
    path: str,
    field: str = "text",
    fields: list[str] | None = None,
    sequence_length: int | None = None,
    tokenizer: str | None = None,
    packing: Packing = "documents",
    vocab_size: int | None = None,
    on_corrupt: OnCorrupt = "stop",
) -> Source:
    """Return the records of a .jsonl file, or of all in a folder.

    Args:
        path: a file or folder.
        field: the field with a text, or with a list of token ids.
        fields: instead, fields of numbers; each becomes an array of the batch.
        sequence_length: tokens the model sees per row.
        tokenizer: a ``tokenizers`` JSON file; without one, every byte is a token.
        packing: whether rows are cut from all records one after the other, or records stay apart.
        vocab_size: tokens of the model, which must suffice.
        on_corrupt: what to do about a line that cannot be read.
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
    return record_source(JsonLines(list_files(path, ENDINGS)), settings)
