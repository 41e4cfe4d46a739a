"""Parquet files: one record per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.records import RecordFiles
from meshwright.errors import ANY, Setting, UserError, did_you_mean, missing_package


@dataclass(frozen=True, kw_only=True)
class ParquetRows(RecordFiles):
    """One record per row; only the columns that are needed are read."""

    endings = (".parquet", ".pq")

    def read_file(self, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the number and the columns of each row."""
        pyarrow, parquet = _import_parquet()
        columns = self.fields or [self.field]
        try:
            with parquet.ParquetFile(file) as table:
                _check_columns(file, columns, table.schema_arrow.names)
                number = 0
                for batch in table.iter_batches(columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{file}, row {number:,}", row
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(
                f"cannot read {file}", why=f"it is not a complete Parquet file: {error}"
            ) from error

    def parse(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row."""
        return raw


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
