"""Parquet: one record per row of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.corrupt import OnCorrupt
from meshwright.data.documents import Packing
from meshwright.data.feed import Source
from meshwright.data.files import list_files
from meshwright.data.records import RecordSettings, record_source
from meshwright.errors import EnvironmentProblem, UserError, did_you_mean

ENDINGS = (".parquet", ".pq")


@dataclass(frozen=True)
class ParquetRows:
    """Some columns of the tables in some files, row by row."""

    files: list[Path]
    columns: list[str]

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for file in self.files:
            yield from self._rows(file)

    def _rows(self, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        pyarrow, parquet = _import_parquet()
        try:
            with parquet.ParquetFile(file) as table:
                self._check_columns(file, table.schema_arrow.names)
                number = 0
                for batch in table.iter_batches(columns=self.columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{file}, row {number:,}", row
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(
                f"cannot read {file}", why=f"it is no Parquet file that is whole: {error}"
            ) from error

    def _check_columns(self, file: Path, found: list[str]) -> None:
        for column in self.columns:
            if column not in found:
                raise UserError(
                    f"{file} has no column `{column}`",
                    why=f"its columns are {', '.join(found)}",
                    fix=did_you_mean(column, found) or "write data.field=… with one of them",
                )

    def parse(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row."""
        return raw


def parquet_source(
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
    """Return the rows of a .parquet file, or of all in a folder.

    Args:
        path: a file or folder.
        field: the column with texts, or with lists of token ids.
        fields: instead, columns of numbers; each becomes an array of the batch.
        sequence_length: tokens the model sees per row.
        tokenizer: a ``tokenizers`` JSON file; without one, every byte is a token.
        packing: whether rows are cut from all records one after the other, or records stay apart.
        vocab_size: tokens of the model, which must suffice.
        on_corrupt: what to do about a row without a value, or with a wrong one.
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
    return record_source(ParquetRows(list_files(path, ENDINGS), fields or [field]), settings)


def _import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentProblem(
            "data=parquet needs the package pyarrow",
            why="it is not installed",
            fix="pip install 'meshwright[parquet]'",
        ) from error
    return pyarrow, pyarrow.parquet
