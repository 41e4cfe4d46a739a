"""Documents on their way from files to tokens: read in blocks, tokenized in batches or pieces."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.data.document_marks import DocumentMarks
from meshwright.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, Tokens
from meshwright.text.units import a_type

Packing = Literal["stream", "documents"]
"""``stream`` cuts rows from all documents joined together; ``documents`` keeps them apart."""

Position = tuple[int, ...]
"""Where reading continues: the number of a file, then what its format needs."""

Document = str | NDArray[Any]
Item = TypeVar("Item")
Result = TypeVar("Result")

BATCH_SIZE = 2**21
"""Characters or tokens that are tokenized at a time: enough to keep several cores busy."""


@dataclass(frozen=True)
class DocumentBlock:
    """Consecutive documents of a file, texts or arrays of tokens, or pieces of a single one.

    Reading continues ``after`` them, ``done`` bytes of all files having been read. Corrupt records
    are ``skipped``: where they are, and what is wrong with them.
    """

    documents: Sequence[Document]
    after: Position
    done: float
    skipped: Sequence[tuple[str, str]] = ()
    is_piece: bool = False
    continues: bool = False


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of some documents, with their marks, and where each of these ends.

    Reading continues ``after`` them, or in None inside a document, ``done`` bytes of all files
    having been read. Corrupt records have the number of their file.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    after: Position | None
    done: float
    skipped: Sequence[tuple[int, str, str]]


def tokenized(
    blocks: Iterable[DocumentBlock], tokenizer: Tokenizer | None, dtype: Any
) -> Iterator[TokenBatch]:
    """Yield the tokens of all documents, batch by batch; the next one is read meanwhile."""
    begins = True

    def tokenize(batch: list[DocumentBlock]) -> TokenBatch:
        nonlocal begins
        begun, begins = begins, not batch[-1].continues
        return _tokenize(batch, tokenizer, dtype, begins=begun)

    return _ahead(tokenize, _batches(blocks))


def _batches(blocks: Iterable[DocumentBlock]) -> Iterator[list[DocumentBlock]]:
    """Yield blocks that are tokenized together; pieces of a document stay alone."""
    batch: list[DocumentBlock] = []
    size = 0
    for block in blocks:
        if block.is_piece:
            if batch:
                yield batch
            yield [block]
            batch, size = [], 0
            continue
        batch.append(block)
        size += sum(map(len, block.documents))
        if size >= BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenize(
    batch: list[DocumentBlock], tokenizer: Tokenizer | None, dtype: Any, *, begins: bool
) -> TokenBatch:
    documents = [document for block in batch for document in block.documents]
    arrays = _arrays(documents, tokenizer)
    last = batch[-1]
    arrays = [_joined(arrays, dtype)] if last.is_piece else [a for a in arrays if len(a)]
    marks = DocumentMarks() if tokenizer is None else tokenizer.marks
    start = np.array(marks.start if begins else (), dtype)
    end = np.array(() if last.continues else marks.end, dtype)
    marked = [(start, a, end) for a in arrays]
    if isinstance(tokenizer, FileTokenizer):
        marked = [(missing_mark(start, a), a, missing_mark(end, a[-len(end) :])) for a in arrays]
    tokens = _joined([part for parts in marked for part in parts], dtype)
    ends = [] if last.continues else np.cumsum([sum(map(len, parts)) for parts in marked])
    return TokenBatch(
        tokens=tokens,
        ends=np.asarray(ends, np.int64),
        after=None if last.continues else last.after,
        done=last.done,
        skipped=[(block.after[0], *what) for block in batch for what in block.skipped],
    )


def check_text(value: Any, name: str) -> str:
    """Return a text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {a_type(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`{name}` is not Unicode text: {error.reason} at character {error.start:,}"
        ) from error
    return value


def missing_mark(mark: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
    """Return a mark, or nothing of it if the document has it already."""
    return mark[:0] if tokens[: len(mark)].tolist() == mark.tolist() else mark


def _arrays(documents: Sequence[Document], tokenizer: Tokenizer | None) -> list[NDArray[Any]]:
    texts = [document for document in documents if isinstance(document, str)]
    if not texts:
        return [document for document in documents if not isinstance(document, str)]
    assert tokenizer is not None, "text needs a tokenizer"
    return encode_texts(tokenizer, texts)


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="unsafe")


def _ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``function(item)`` for each item, computed while the next item is read."""
    with ThreadPoolExecutor(1) as pool:
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


LONG = 2**22
"""Characters above which a text is cut; a tokenizer needs several hundred times their memory."""
PIECE = 2**18
"""Characters of a piece, at least: many pieces are tokenized at once, on several cores."""
CONTEXT = 2**10
"""Characters on both sides of a cut for which the tokens are compared."""
TRIES = 32
"""Line ends that are tried before a piece becomes longer."""


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Return the tokens of each text."""
    if isinstance(tokenizer, ByteTokenizer) or all(len(text) <= LONG for text in texts):
        return tokenizer.encode_many(texts)
    return [
        tokenizer.encode(text)
        if len(text) <= LONG
        else np.concatenate(
            [
                tokens
                for group in pieces(_parts(text), tokenizer)
                for tokens in tokenizer.encode_many(group)
            ]
        )
        for text in texts
    ]


def _parts(text: str) -> Iterator[str]:
    return (text[start : start + LONG] for start in range(0, len(text), LONG))


def pieces(parts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[str]]:
    """Yield the pieces of a text that comes in parts, in groups of about ``LONG`` characters."""
    rest, group, size, search = "", list[str](), 0, PIECE
    for part in parts:
        rest += part
        begin = 0
        while (cut := find_cut(rest, begin + search, tokenizer)) is not None:
            group.append(rest[begin:cut])
            size += cut - begin
            begin, search = cut, PIECE
            if size >= LONG:
                yield group
                group, size = [], 0
        rest = rest[begin:]
        # Places that were tried already are not tried again.
        search = max(PIECE, len(rest) - CONTEXT)
    yield [*group, rest]


def find_cut(text: str, start: int, tokenizer: Tokenizer) -> int | None:
    """Return a place after ``start`` where cutting a text leaves its tokens as they are.

    Such a place is the end of a line between two that are not blank, if the tokens of its
    surroundings are those of its two sides. Tokenizers look at no more than a word or a line.
    """
    cut = start
    for _ in range(TRIES):
        cut = text.find("\n", cut) + 1
        if not cut or cut + CONTEXT > len(text):
            return None
        if text[cut].isspace() or text[cut - 2].isspace():
            continue
        left, right = text[max(cut - CONTEXT, 0) : cut], text[cut : cut + CONTEXT]
        whole, *sides = tokenizer.encode_many([left + right, left, right])
        if np.array_equal(whole, np.concatenate(sides)):
            return cut
    return None
