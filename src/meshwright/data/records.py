"""Datasets of records, each with a text, a list of tokens, or numbers for several arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from meshwright.data.arrays import ArraySource
from meshwright.data.corrupt import CorruptRecords, OnCorrupt
from meshwright.data.documents import Documents, Packing
from meshwright.data.files import list_files
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import HostBatch, Source
from meshwright.data.tokenizer import check_vocabulary, load_tokenizer
from meshwright.errors import Setting, UserError


@dataclass(frozen=True, kw_only=True)
class RecordFiles(ABC):
    """Files of records in one format, and how records become samples: the keys of ``data``.

    Attributes:
        path: a file, or a folder of files.
        field: the field with a text, or with a list of token ids.
        fields: instead, fields of numbers; each becomes an array of the batch.
        sequence_length: tokens the model sees per row.
        tokenizer: a ``tokenizers`` JSON file; without one, every byte is a token.
        packing: ``stream`` cuts rows from all records joined together; ``documents`` keeps
            records apart.
        vocab_size: size of the model's vocabulary, which must hold every token.
        on_corrupt: what to do about a record that cannot be read.
    """

    path: str
    field: str = "text"
    fields: list[str] | None = None
    sequence_length: int | None = None
    tokenizer: str | None = None
    packing: Packing = "documents"
    vocab_size: int | None = None
    on_corrupt: OnCorrupt = "stop"

    endings: ClassVar[tuple[str, ...]]
    """How the names of such files end."""

    @property
    def name(self) -> str:
        """Where the records come from, for messages."""
        return str(Setting("data.path", self.path))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield each record's location, for messages, and its raw content."""
        for file in list_files(self.path, self.endings):
            yield from self.read_file(file)

    @abstractmethod
    def read_file(self, file: Path) -> Iterator[tuple[str, Any]]:
        """Yield the location and raw content of each record of one file."""

    @abstractmethod
    def parse(self, raw: Any) -> Any:
        """Return a record's fields by name; a ValueError says what is wrong with it."""

    def source(self) -> Source:
        """Read all records and return them as rows of tokens, or as arrays."""
        corrupt = CorruptRecords(self.on_corrupt)
        parsed = _parsed(self, corrupt)
        read = _arrays if self.fields else _documents
        return with_count(read(parsed, self, corrupt), corrupt)


def is_record_files(builder: Any) -> bool:
    """Whether a builder of data is a format of record files, whose samples are still to be read."""
    return isinstance(builder, type) and issubclass(builder, RecordFiles)


@dataclass(frozen=True)
class CountedSource:
    """A source without the records that were skipped."""

    source: Any
    corrupt: CorruptRecords

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the source."""
        return getattr(self.source, "tokenizer", None)

    @property
    def num_skipped(self) -> int:
        """Number of records that could not be read."""
        return self.corrupt.count

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the source's rows."""
        return self.source.rows(ids)

    def fingerprint(self) -> str:
        """Return a fingerprint of the source and the number of skipped records."""
        return fingerprint_of(self.source.fingerprint(), self.corrupt.count)

    def describe(self) -> str:
        """Return the source's description and the number of skipped records."""
        return f"{self.source.describe()}; {self.corrupt.summary()}"


def with_count(source: Source, corrupt: CorruptRecords) -> Source:
    """Warn about skipped records, if any, and return a source that mentions them."""
    corrupt.warn()
    return CountedSource(source, corrupt) if corrupt.count else source


def _parsed(records: RecordFiles, corrupt: CorruptRecords) -> Iterator[tuple[str, Any]]:
    for where, raw in records:
        try:
            record = records.parse(raw)
        except ValueError as error:
            corrupt.add(where, str(error))
            continue
        yield where, record


def _documents(
    parsed: Iterator[tuple[str, Any]], files: RecordFiles, corrupt: CorruptRecords
) -> Source:
    if files.sequence_length is None:
        key = Setting("data.sequence_length")
        raise UserError(f"`{key}` is missing", fix=f"write {key}=…")
    documents: Documents | None = None
    is_text = True
    for where, record in parsed:
        try:
            value = _field(record, files.field)
            if documents is None:
                is_text = isinstance(value, str)
                documents = _empty_documents(files, is_text)
            if is_text:
                documents.add_text(_text(value, files.field))
            else:
                documents.add_tokens([_tokens(value, files)])
        except ValueError as error:
            # A UserError is also a ValueError, and stops the run whatever the policy.
            if isinstance(error, UserError):
                raise
            corrupt.add(where, str(error))
    if documents is None:
        raise _nothing(files, corrupt)
    return documents.into_rows(files.packing, files.sequence_length, files.name)


def _empty_documents(files: RecordFiles, is_text: bool) -> Documents:
    if not is_text and files.tokenizer is None:
        return Documents(None, files.vocab_size)
    tokenizer = load_tokenizer(files.tokenizer)
    check_vocabulary(tokenizer, files.vocab_size)
    return Documents(tokenizer, files.vocab_size if not is_text else tokenizer.vocab_size)


def _arrays(
    parsed: Iterator[tuple[str, Any]], files: RecordFiles, corrupt: CorruptRecords
) -> Source:
    names = files.fields or []
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for where, record in parsed:
        try:
            values = {name: _numbers(_field(record, name), name) for name in names}
            for name, value in values.items():
                if columns[name] and value.shape != columns[name][0].shape:
                    expected = columns[name][0].shape
                    raise ValueError(f"`{name}` has shape {value.shape}, the first {expected}")
        except ValueError as error:
            corrupt.add(where, str(error))
            continue
        for name, value in values.items():
            columns[name].append(value)
    if not columns[names[0]]:
        raise _nothing(files, corrupt)
    return ArraySource(**{name: np.stack(values) for name, values in columns.items()})


def _nothing(files: RecordFiles, corrupt: CorruptRecords) -> UserError:
    why = (
        "there are no records" if not corrupt.count else f"every record is corrupt: {corrupt.first}"
    )
    return UserError(f"{files.name} is empty", why=why)


def _field(record: Any, name: str) -> Any:
    if not isinstance(record, dict):
        raise ValueError(f"it is a {type(record).__name__}, not an object with fields")
    if record.get(name) is None:
        raise ValueError(f"it has no `{name}`, but {', '.join(map(str, record)) or 'nothing'}")
    return record[name]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is a {type(value).__name__}, not text")
    return value


def _tokens(value: Any, files: RecordFiles) -> NDArray[Any]:
    tokens = _numbers(value, files.field)
    if not tokens.size:
        return tokens
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"`{files.field}` is not a list of token ids")
    highest = (files.vocab_size or 2**31) - 1
    if tokens.min() < 0 or tokens.max() > highest:
        found = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ValueError(f"the token {found:,} is not from 0 to {highest:,}")
    return tokens


def _numbers(value: Any, name: str) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" and array.size:
        raise ValueError(f"`{name}` holds {type(value).__name__}, not numbers")
    return array
