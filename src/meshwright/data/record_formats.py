"""The formats of files of records: JSON Lines, Parquet and ArrayRecord."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.data.documents import Position
from meshwright.data.records import RawBlock, RecordFiles
from meshwright.data.tokens import TokenType
from meshwright.errors import ANY, Setting, UserError, did_you_mean, missing_package

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
        unzip: Any = gzip.open if file.suffix == ".gz" else nullcontext
        try:
            with open(file, "rb") as raw, unzip(raw) as content:
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


BATCH_BYTES = 2**21
"""Rows that are read at a time have about this many bytes together."""


@dataclass(frozen=True, kw_only=True)
class ParquetRows(RecordFiles):
    """One record per row; only the columns that are needed are read."""

    endings = (".parquet", ".pq")

    unit = "row"

    def read_file(self, file: Path, start: Position) -> Iterator[RawBlock]:
        """Yield some rows at a time; a position is the number of rows before the next."""
        pyarrow, parquet = _import_parquet()
        group, before, (skip,) = 0, 0, start or (0,)
        try:
            # Buffered, because otherwise whole columns of a row group are read.
            with parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False) as table:
                columns = self.columns(file, table.schema_arrow.names)
                total = max(table.metadata.num_rows, 1)
                for group in range(table.metadata.num_row_groups):
                    about = table.metadata.row_group(group)
                    if before + about.num_rows <= skip:
                        before += about.num_rows
                        continue
                    size = BATCH_BYTES * about.num_rows // max(about.total_byte_size, 1)
                    for batch in table.iter_batches(min(max(size, 1), 2**14), [group], columns):
                        known = min(max(skip - before, 0), len(batch))
                        rows = batch.slice(known).to_pylist()
                        records = list(enumerate(rows, start=before + known + 1))
                        before += len(batch)
                        note = f" (row group {group:,})"
                        yield RawBlock(records, (before,), before / total, note)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(
                f"cannot read {file}, row group {group:,}",
                why=f"it is not a complete Parquet file: {error}",
            ) from error

    def columns(self, file: Path, present: list[str]) -> list[str]:
        """Return the columns to read, of those that a file has."""
        wanted = self.fields or [self.field]
        for column in wanted:
            if column not in present:
                raise UserError(
                    f"{file} has no column `{column}`",
                    why=f"its columns are {', '.join(present)}",
                    fix=did_you_mean(column, present)
                    or f"write {Setting('data.field', ANY)} with one of them",
                )
        return wanted

    def parse(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row."""
        return raw


def _import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package("data=parquet", "pyarrow", "parquet") from error
    return pyarrow, pyarrow.parquet
