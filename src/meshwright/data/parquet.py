"""Parquet files: one record per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.documents import Position
from meshwright.data.records import RawBlock, RecordFiles
from meshwright.errors import ANY, Setting, UserError, did_you_mean, missing_package

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
                    for batch in table.iter_batches(_rows_at_once(about), [group], columns):
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
        _check_columns(file, wanted, present)
        return wanted

    def parse(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row."""
        return raw


def _rows_at_once(group: Any) -> int:
    """Return how many rows of a row group to read at a time."""
    return min(max(BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1), 1), 2**14)


def _check_columns(file: Path, wanted: list[str], present: list[str]) -> None:
    for column in wanted:
        if column not in present:
            raise UserError(
                f"{file} has no column `{column}`",
                why=f"its columns are {', '.join(present)}",
                fix=did_you_mean(column, present)
                or f"write {Setting('data.field', ANY)} with one of them",
            )


def _import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package("data=parquet", "pyarrow", "parquet") from error
    return pyarrow, pyarrow.parquet
