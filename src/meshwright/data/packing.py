"""Packing documents into rows: which pieces share a row, computed once for all documents."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import release

Ints = NDArray[np.int64]

PART_DOCUMENTS = 2**17
"""Documents whose pieces are computed together."""
PART_PIECES = 2**18
"""Pieces that are packed together, and held in memory."""


@dataclass(frozen=True)
class PackingIndex:
    """Pieces of documents in rows.

    Attributes:
        starts: where each piece begins in the flat tokens.
        lengths: tokens of each piece.
        first: the first piece of each row, followed by the number of pieces.
        row_length: tokens a row can hold.
        num_tokens: tokens of all pieces.
    """

    starts: Ints
    lengths: NDArray[np.int64] | NDArray[np.int32]
    first: Ints
    row_length: int
    num_tokens: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def fill(self) -> float:
        """The fraction of all positions that hold a token."""
        return self.num_tokens / (len(self) * self.row_length)


@dataclass(frozen=True)
class RowTokens:
    """Where the tokens of some rows come from, token by token.

    Attributes:
        sources: positions in the flat tokens.
        targets: positions in the flattened rows.
        segments: the number of the token's piece within its row, from 1.
        positions: the token's position within its document, or within its piece if the document
            is longer than a row.
    """

    sources: Ints
    targets: Ints
    segments: Ints
    positions: Ints


@dataclass(frozen=True)
class PackedPart:
    """Consecutive whole rows: their pieces, and the number of each row's first piece."""

    starts: Ints
    lengths: Ints
    first: Ints


def pack(boundaries: Ints, row_length: int) -> PackingIndex:
    """Return how documents are packed, as computed by `pack_parts`, in memory."""
    return collect(pack_parts(boundaries, row_length), row_length)


def collect(packed: Iterable[PackedPart], row_length: int) -> PackingIndex:
    """Return the parts of an index as one, in memory."""
    parts, empty = list(packed), np.empty(0, np.int64)
    starts = np.concatenate([empty, *(part.starts for part in parts)])
    lengths = np.concatenate([empty, *(part.lengths for part in parts)])
    first = np.concatenate([*(part.first for part in parts), [len(starts)]]).astype(np.int64)
    return PackingIndex(starts, lengths, first, row_length, int(lengths.sum()))


def pack_parts(boundaries: Ints, row_length: int) -> Iterator[PackedPart]:
    """Put documents into rows in their order, each into the current row if it still fits.

    A document longer than a row is cut into pieces. A piece begins with the last token of the
    piece before it, so that every token but a document's first is predicted exactly once.

    Args:
        boundaries: document i is the flat tokens from ``boundaries[i]`` to ``boundaries[i + 1]``.
        row_length: tokens of a row, 2 or more.

    Yields:
        Part after part, so that an index of any size can be written to a file.
    """
    starts = lengths = np.empty(0, np.int64)
    before = 0
    for more_starts, more_lengths in _cut(boundaries, row_length):
        starts = np.concatenate([starts, more_starts])
        lengths = np.concatenate([lengths, more_lengths])
        first = _rows(lengths, row_length)
        # The last row might take further pieces.
        whole = int(first[-1])
        if whole:
            yield PackedPart(starts[:whole], lengths[:whole], before + first[:-1])
        starts, lengths, before = starts[whole:], lengths[whole:], before + whole
    if len(starts):
        yield PackedPart(starts, lengths, np.array([before], np.int64))


def _rows(lengths: Ints, row_length: int) -> Ints:
    """Return the first piece of each row."""
    ends = np.cumsum(lengths)
    # For each piece that might begin a row: the first piece that no longer fits.
    following = np.searchsorted(ends, ends - lengths + row_length, side="right").tolist()
    first = [0]
    while (row := following[first[-1]]) < len(following):
        first.append(row)
    return np.asarray(first, np.int64)


Keep = Callable[[Ints, Ints], NDArray[np.bool_]]
"""Says which documents to keep, by where each begins and how long it is."""


def best_fit_parts(
    boundaries: Ints, row_length: int, keep: Keep, *, alone: bool = False
) -> Iterator[PackedPart]:
    """Put documents into rows by best fit, longest first: each where the least room is left.

    Only the beginning of a document longer than a row is kept. Rows are in the order of their
    first documents, and documents of a row in their own order; ``alone``, each has its own row.
    """
    before = 0
    for begin in range(0, len(boundaries) - 1, PART_DOCUMENTS):
        bounds = np.array(boundaries[begin : begin + PART_DOCUMENTS + 1])
        starts, lengths = bounds[:-1], np.minimum(np.diff(bounds), row_length)
        kept = keep(starts, np.diff(bounds)) & (lengths > 0)
        starts, lengths = starts[kept], lengths[kept]
        rows = np.arange(len(lengths)) if alone else best_fit(lengths, row_length)
        order = np.argsort(rows, kind="stable")
        first = np.flatnonzero(np.diff(rows[order], prepend=-1))
        if len(first):
            yield PackedPart(starts[order], lengths[order], before + first)
        before += len(starts)


def best_fit(lengths: Ints, row_length: int) -> Ints:
    """Return the row of each document, numbered by their first documents."""
    # Rows with this much room, by their room, and all such rooms in order.
    rows: dict[int, list[int]] = {}
    rooms: list[int] = []
    chosen, count = np.empty(len(lengths), np.int64), 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room, count = count, row_length, count + 1
        else:
            room = rooms[at]
            row = rows[room].pop()
            if not rows[room]:
                rooms.pop(at)
        chosen[document] = row
        left = room - length
        if not rows.setdefault(left, []):
            insort(rooms, left)
        rows[left].append(row)
    _, first, inverse = np.unique(chosen, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first, kind="stable"), kind="stable")[inverse]


def place(index: PackingIndex, ids: Ints) -> RowTokens:
    """Return the tokens of the rows with these ids."""
    first, last = np.asarray(index.first[ids]), np.asarray(index.first[ids + 1])
    rows, number = _count_up(last - first)
    pieces = first[rows] + number
    lengths = np.asarray(index.lengths[pieces], np.int64)
    starts = np.asarray(index.starts[pieces])
    for array in (index.first, index.lengths, index.starts):
        release(array, len(ids))
    # Tokens of the row before each piece: the running sum, less that of the row's first piece.
    before = np.cumsum(lengths) - lengths
    before -= before[np.searchsorted(rows, rows)]
    which, within = _count_up(lengths)
    return RowTokens(
        sources=starts[which] + within,
        targets=(rows * index.row_length + before)[which] + within,
        segments=number[which] + 1,
        positions=within,
    )


def _cut(boundaries: Ints, row_length: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield start and length of every piece, some at a time; empty documents have none."""
    for document in range(0, len(boundaries) - 1, PART_DOCUMENTS):
        bounds = np.array(boundaries[document : document + PART_DOCUMENTS + 1])
        release(boundaries, 1, len(bounds))
        documents = np.diff(bounds)
        # A document of one row is one piece; each further piece brings row_length - 1 new tokens.
        counts = np.maximum(-(-(documents - 1) // (row_length - 1)), 1)
        counts[documents == 0] = 0
        ends = np.cumsum(counts)
        for piece in range(0, int(ends[-1]), PART_PIECES):
            numbers = np.arange(piece, min(piece + PART_PIECES, int(ends[-1])), dtype=np.int64)
            which = np.searchsorted(ends, numbers, side="right")
            offsets = (numbers - (ends - counts)[which]) * (row_length - 1)
            yield bounds[which] + offsets, np.minimum(documents[which] - offsets, row_length)


def _count_up(counts: Ints) -> tuple[Ints, Ints]:
    """Return for [2, 3]: [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]."""
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    begin = np.cumsum(counts) - counts
    return which, np.arange(len(which), dtype=np.int64) - begin[which]
