"""Packing documents into rows: which pieces share a row, computed once for all documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PackingIndex:
    """Pieces of documents in rows.

    Attributes:
        starts: where each piece begins in the flat tokens.
        lengths: tokens of each piece.
        first: the first piece of each row, followed by the number of pieces.
        row_length: tokens a row can hold.
    """

    starts: Ints
    lengths: Ints
    first: Ints
    row_length: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def fill(self) -> float:
        """The fraction of all positions that hold a token."""
        return float(self.lengths.sum() / (len(self) * self.row_length))


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


def pack(boundaries: Ints, row_length: int) -> PackingIndex:
    """Put documents into rows in their order, each into the current row if it still fits.

    A document longer than a row is cut into pieces. A piece begins with the last token of the
    piece before it, so that every token but a document's first is predicted exactly once.

    Args:
        boundaries: document i is the flat tokens from ``boundaries[i]`` to ``boundaries[i + 1]``.
        row_length: tokens of a row, 2 or more.
    """
    starts, lengths = _cut(boundaries, row_length)
    ends = np.cumsum(lengths)
    # For each piece that might begin a row: the first piece that no longer fits.
    row_ends = ends - lengths + row_length
    following = np.searchsorted(ends, row_ends, side="right").tolist()
    first = [0]
    while first[-1] < len(following):
        first.append(following[first[-1]])
    return PackingIndex(starts, lengths, np.asarray(first, np.int64), row_length)


def place(index: PackingIndex, ids: Ints) -> RowTokens:
    """Return the tokens of the rows with these ids."""
    first, last = index.first[ids], index.first[ids + 1]
    rows, number = _count_up(last - first)
    pieces = first[rows] + number
    lengths = index.lengths[pieces]
    # Tokens of the row before each piece: the running sum, less that of the row's first piece.
    before = np.cumsum(lengths) - lengths
    before -= before[np.searchsorted(rows, rows)]
    which, within = _count_up(lengths)
    return RowTokens(
        sources=index.starts[pieces][which] + within,
        targets=(rows * index.row_length + before)[which] + within,
        segments=number[which] + 1,
        positions=within,
    )


def _cut(boundaries: Ints, row_length: int) -> tuple[Ints, Ints]:
    """Return start and length of every piece; empty documents have none."""
    documents = np.diff(boundaries)
    # A document of one row is one piece; each further piece brings row_length - 1 new tokens.
    counts = np.maximum(-(-(documents - 1) // (row_length - 1)), 1)
    counts[documents == 0] = 0
    which, number = _count_up(counts)
    offsets = number * (row_length - 1)
    lengths = np.minimum(documents[which] - offsets, row_length)
    return boundaries[:-1][which] + offsets, lengths


def _count_up(counts: Ints) -> tuple[Ints, Ints]:
    """Return for [2, 3]: [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]."""
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    begin = np.cumsum(counts) - counts
    return which, np.arange(len(which), dtype=np.int64) - begin[which]
