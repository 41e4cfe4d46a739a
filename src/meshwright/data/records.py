"""Datasets of records, each with a text, a list of tokens, or numbers for several arrays."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from meshwright.data.arrays import ArraySource
from meshwright.data.corrupt import CorruptRecords, OnCorrupt, with_count
from meshwright.data.documents import Document, DocumentBlock, Item, Packing, Position, check_text
from meshwright.data.files import list_files
from meshwright.data.protocols import Source
from meshwright.data.token_cache import Corpus, nothing
from meshwright.data.tokenizer import load_tokenizer, token_dtype
from meshwright.errors import Setting, UserError
from meshwright.text.units import a_type


@dataclass(frozen=True)
class RawBlock:
    """Consecutive records of a file by number, not parsed yet; ``done`` is its share read so far.

    Reading continues ``after`` them. A message about one adds the ``note`` to its number.
    """

    records: Sequence[tuple[int, Any]]
    after: Position
    done: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordFiles(ABC):
    """Files of records in one format, and how records become samples: the keys of ``data``.

    Other keys are those of `text_source`, which describes them; ``path`` is required, and
    ``packing`` keeps records apart by default.

    Attributes:
        field: the field with a text, or with a list of token ids.
        fields: instead, fields of numbers; each becomes an array of the batch.
        on_corrupt: what to do about a record that cannot be read.
    """

    path: str | list[str]
    field: str = "text"
    fields: list[str] | None = None
    sequence_length: int | None = None
    tokenizer: str | None = None
    packing: Packing = "documents"
    vocab_size: int | None = None
    on_corrupt: OnCorrupt = "stop"
    cache_dir: str | None = None

    endings: ClassVar[tuple[str, ...]]
    """How the names of such files end."""
    unit: ClassVar[str]
    """What a record is called in its file."""

    @property
    def name(self) -> str:
        """Where the records come from, for messages."""
        return str(Setting("data.path", self.path))

    @abstractmethod
    def read_file(self, file: Path, start: Position) -> Iterator[RawBlock]:
        """Yield the records of one file from a position on; () is its beginning."""

    @abstractmethod
    def parse(self, raw: Any) -> Any:
        """Return a record's fields by name; a ValueError says what is wrong with it."""

    def format_settings(self) -> tuple[Any, ...]:
        """Return the settings of the format that change what records hold."""
        return ()

    def source(self) -> Source:
        """Return the records as rows of tokens, or as arrays."""
        files = list_files(self.path, self.endings)
        return _arrays(self, files) if self.fields else _documents(self, files)

    def where(self, block: RawBlock, number: int) -> str:
        """Return the place of a record in its file."""
        return f"{self.unit} {number:,}{block.note}"


def is_record_files(builder: Any) -> bool:
    """Whether a builder of data is a format of record files, whose samples are still to be read."""
    return isinstance(builder, type) and issubclass(builder, RecordFiles)


def _documents(records: RecordFiles, files: Sequence[Path]) -> Source:
    if records.sequence_length is None:
        key = Setting("data.sequence_length")
        raise UserError(f"`{key}` is missing", fix=f"write {key}=…")
    is_text = isinstance(_first_value(records, files), str)
    tokenizer = None
    if is_text or records.tokenizer is not None:
        tokenizer = load_tokenizer(records.tokenizer, records.vocab_size)
    # Token ids beyond the vocabulary are corrupt records.
    limit = None if is_text else records.vocab_size
    size = tokenizer.vocab_size if is_text and tokenizer else limit or 2**31

    def document(record: Any) -> Document:
        value = field_of(record, records.field)
        return check_text(value, records.field) if is_text else _tokens(value, records)

    settings = type(records).__name__, records.field, is_text, limit, *records.format_settings()
    corpus = Corpus(
        name=records.name,
        files=files,
        tokenizer=tokenizer,
        dtype=token_dtype(size),
        settings=settings,
        read=lambda position: document_blocks(records, files, position, document, list),
        on_corrupt=records.on_corrupt,
    )
    return corpus.rows(records.cache_dir, records.packing, records.sequence_length)


def _first_value(records: RecordFiles, files: Sequence[Path]) -> Any:
    """Return the field of the first whole record, which tells text from token ids."""
    corrupt = CorruptRecords(records.on_corrupt)
    for where, record in parsed_records(records, files, corrupt):
        try:
            return field_of(record, records.field)
        except ValueError as error:
            corrupt.add(where, str(error))
    raise nothing(records.name, corrupt, "there are no records")


def document_blocks(
    records: RecordFiles,
    files: Sequence[Path],
    position: Position,
    read: Callable[[Any], Item],
    finish: Callable[[list[Item]], Sequence[Document]],
) -> Iterator[DocumentBlock]:
    """Yield the documents of files from a position on.

    ``read`` returns what a record holds, or raises a ValueError about it; ``finish`` makes
    documents of what some records hold.
    """
    sizes = [file.stat().st_size for file in files]
    first, *start = position
    for number in range(first, len(files)):
        for raw in records.read_file(files[number], tuple(start)):
            items: list[Item] = []
            skipped: list[tuple[str, str]] = []
            for count, content in raw.records:
                try:
                    items.append(read(records.parse(content)))
                except UserError:
                    # It is not about the record.
                    raise
                except ValueError as error:
                    skipped.append((records.where(raw, count), str(error)))
            done = sum(sizes[:number]) + raw.done * sizes[number]
            yield DocumentBlock(finish(items), (number, *raw.after), done, skipped)
        start = []


def parsed_records(
    records: RecordFiles, files: Sequence[Path], corrupt: CorruptRecords
) -> Iterator[tuple[str, Any]]:
    """Yield where each record is, and the record."""
    for file in files:
        for block in records.read_file(file, ()):
            for number, raw in block.records:
                where = f"{file}, {records.where(block, number)}"
                try:
                    record = records.parse(raw)
                except ValueError as error:
                    corrupt.add(where, str(error))
                    continue
                yield where, record


def _arrays(records: RecordFiles, files: Sequence[Path]) -> Source:
    corrupt = CorruptRecords(records.on_corrupt)
    names = records.fields or []
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for where, record in parsed_records(records, files, corrupt):
        try:
            values = {name: _numbers(field_of(record, name), name) for name in names}
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
        raise nothing(records.name, corrupt, "there are no records")
    arrays = {name: np.stack(values) for name, values in columns.items()}
    return with_count(ArraySource(**arrays), corrupt)


def field_of(record: Any, name: str) -> Any:
    """Return a field of a record."""
    if not isinstance(record, dict):
        raise ValueError(f"it is {a_type(record)}, not an object with fields")
    if record.get(name) is None:
        raise ValueError(f"it has no `{name}`, but {', '.join(map(str, record)) or 'nothing'}")
    return record[name]


def _tokens(value: Any, records: RecordFiles) -> NDArray[Any]:
    tokens = _numbers(value, records.field)
    if not tokens.size:
        return tokens
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"`{records.field}` is not a list of token ids")
    highest = (records.vocab_size or 2**31) - 1
    if tokens.min() < 0 or tokens.max() > highest:
        found = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ValueError(f"the token {found:,} is not from 0 to {highest:,}")
    return tokens


def _numbers(value: Any, name: str) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" and array.size:
        raise ValueError(f"`{name}` holds {type(value).__name__}, not numbers")
    return array
