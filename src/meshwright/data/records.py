"""Datasets of records: each holds a text, a list of tokens, or numbers for several arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.arrays import ArraySource
from meshwright.data.corrupt import CorruptRecords, OnCorrupt
from meshwright.data.documents import Documents, Packing
from meshwright.data.feed import HostBatch, Source, fingerprint_of
from meshwright.data.tokenizer import check_vocabulary, load_tokenizer
from meshwright.errors import UserError


class Records(Protocol):
    """A file format: where each record is, and what it holds."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield for each record where it is, for people, and its raw content."""
        ...

    def parse(self, raw: Any) -> Any:
        """Return a record's fields by name; a ValueError says what is wrong with it."""
        ...


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """How records become samples.

    Attributes:
        name: where they come from, for people.
        field: the field with the text or the tokens.
        fields: fields of numbers that become arrays, instead of ``field``.
        sequence_length: tokens the model sees per row.
        tokenizer: a ``tokenizers`` JSON file; without one, every byte is a token.
        packing: whether rows are cut from all records one after the other, or records stay apart.
        vocab_size: tokens of the model.
        on_corrupt: what to do about a record that cannot be read.
    """

    name: str
    field: str
    fields: list[str] | None
    sequence_length: int | None
    tokenizer: str | None
    packing: Packing
    vocab_size: int | None
    on_corrupt: OnCorrupt


@dataclass(frozen=True)
class CountedSource:
    """A source some records of which were skipped."""

    source: Any
    corrupt: CorruptRecords

    @property
    def tokenizer(self) -> Any:
        """The source's."""
        return getattr(self.source, "tokenizer", None)

    @property
    def num_skipped(self) -> int:
        """Records that could not be read."""
        return self.corrupt.count

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the source's rows."""
        return self.source.rows(ids)

    def fingerprint(self) -> str:
        """Return the source's, and how much was skipped."""
        return fingerprint_of(self.source.fingerprint(), self.corrupt.count)

    def describe(self) -> str:
        """Return the source's line, and how much was skipped."""
        return f"{self.source.describe()}; {self.corrupt.note()}"


def with_count(source: Source, corrupt: CorruptRecords) -> Source:
    """Return the source, which tells about skipped records if there were any; warn of them."""
    corrupt.warn()
    return CountedSource(source, corrupt) if corrupt.count else source


def record_source(records: Records, settings: RecordSettings) -> Source:
    """Read all records and return them as rows of tokens, or as arrays."""
    corrupt = CorruptRecords(settings.on_corrupt)
    parsed = _parsed(records, corrupt)
    if settings.fields:
        return with_count(_arrays(parsed, settings, corrupt), corrupt)
    return with_count(_documents(parsed, settings, corrupt), corrupt)


def _parsed(records: Records, corrupt: CorruptRecords) -> Iterator[tuple[str, Any]]:
    for where, raw in records:
        try:
            record = records.parse(raw)
        except ValueError as error:
            corrupt.meet(where, str(error))
            continue
        yield where, record


def _documents(
    parsed: Iterator[tuple[str, Any]], settings: RecordSettings, corrupt: CorruptRecords
) -> Source:
    if settings.sequence_length is None:
        raise UserError("`data.sequence_length` is missing", fix="write data.sequence_length=…")
    documents: Documents | None = None
    is_text = True
    for where, record in parsed:
        try:
            value = _field(record, settings.field)
            if documents is None:
                is_text = isinstance(value, str)
                documents = _empty_documents(settings, is_text)
            if is_text:
                documents.add_text(_text(value, settings.field))
            else:
                documents.add_tokens([_tokens(value, settings)])
        except ValueError as error:
            # A UserError is one too, and stops whatever the policy.
            if isinstance(error, UserError):
                raise
            corrupt.meet(where, str(error))
    if documents is None:
        raise _nothing(settings, corrupt)
    return documents.into_rows(settings.packing, settings.sequence_length, settings.name)


def _empty_documents(settings: RecordSettings, is_text: bool) -> Documents:
    if not is_text and settings.tokenizer is None:
        return Documents(None, settings.vocab_size)
    tokenizer = load_tokenizer(settings.tokenizer)
    check_vocabulary(tokenizer, settings.vocab_size)
    return Documents(tokenizer, settings.vocab_size if not is_text else tokenizer.vocab_size)


def _arrays(
    parsed: Iterator[tuple[str, Any]], settings: RecordSettings, corrupt: CorruptRecords
) -> Source:
    names = settings.fields or []
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for where, record in parsed:
        try:
            values = {name: _numbers(_field(record, name), name) for name in names}
            for name, value in values.items():
                if columns[name] and value.shape != columns[name][0].shape:
                    expected = columns[name][0].shape
                    raise ValueError(f"`{name}` has shape {value.shape}, the first {expected}")
        except ValueError as error:
            corrupt.meet(where, str(error))
            continue
        for name, value in values.items():
            columns[name].append(value)
    if not columns[names[0]]:
        raise _nothing(settings, corrupt)
    return ArraySource(**{name: np.stack(values) for name, values in columns.items()})


def _nothing(settings: RecordSettings, corrupt: CorruptRecords) -> UserError:
    why = "there are no records" if not corrupt.count else f"no record is whole: {corrupt.first}"
    return UserError(f"{settings.name} is empty", why=why)


def _field(record: Any, name: str) -> Any:
    if not isinstance(record, dict):
        raise ValueError(f"it is a {type(record).__name__}, not fields by name")
    if record.get(name) is None:
        raise ValueError(f"it has no `{name}`, but {', '.join(map(str, record)) or 'nothing'}")
    return record[name]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is a {type(value).__name__}, not a text")
    return value


def _tokens(value: Any, settings: RecordSettings) -> NDArray[Any]:
    tokens = _numbers(value, settings.field)
    if not tokens.size:
        return tokens
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"`{settings.field}` is no list of token ids")
    highest = (settings.vocab_size or 2**31) - 1
    if tokens.min() < 0 or tokens.max() > highest:
        found = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ValueError(f"the token {found:,} is not from 0 to {highest:,}")
    return tokens


def _numbers(value: Any, name: str) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" and array.size:
        raise ValueError(f"`{name}` holds {type(value).__name__}, not numbers")
    return array
