"""Rows of tokens: cut from one long stream, or packed from separate documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.contents import array_contents
from meshwright.data.files import release
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.packing import PackingIndex, place
from meshwright.data.protocols import HostBatch
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import Setting, UserError


@dataclass(frozen=True)
class StreamRows:
    """Consecutive rows of token arrays, each one token longer than the sequence.

    A row's last token is the next row's first, so that every token but the first is predicted
    exactly once. Tokens at the end of an array that do not fill a row are not used; no row spans
    two arrays. With a separator, the end-of-document token, rows also have ``segment_ids`` and
    ``positions``. Without a ``vocab_size``, tokens are not checked.
    """

    arrays: Sequence[NDArray[Any]]
    sequence_length: int
    name: str
    tokenizer: Tokenizer | None = None
    vocab_size: int | None = None
    separator: int | None = None

    def __post_init__(self) -> None:
        check_length(len(self), max(map(len, self.arrays)), self.sequence_length, self.name)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([max(len(a) - 1, 0) // self.sequence_length for a in self.arrays])

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return ``tokens`` of shape [len(ids), sequence_length + 1]."""
        tokens = np.empty((len(ids), self.sequence_length + 1), np.int32)
        which = np.searchsorted(self._ends, ids, side="right")
        starts = (ids - np.concatenate([[0], self._ends])[which]) * self.sequence_length
        # Slice by slice: one copy per row is faster than an index per token.
        for row, array, start in zip(tokens, which, starts, strict=True):
            row[:] = self.arrays[array][start : start + self.sequence_length + 1]
            release(self.arrays[array], 1, self.sequence_length)
        check_tokens(tokens, self.vocab_size, self.name)
        if self.separator is None:
            return {"tokens": tokens}
        return {"tokens": tokens, **documents_of(tokens, self.separator)}

    def fingerprint(self) -> str:
        """Return a fingerprint of the tokens and how they are cut."""
        contents = [
            (len(array), str(array.dtype), content)
            for array, content in zip(self.arrays, array_contents(self.arrays), strict=True)
        ]
        return fingerprint_of("stream", contents, self.sequence_length, self.separator)

    def describe(self) -> str:
        """Return the number of tokens and rows in one line."""
        total = sum(map(len, self.arrays))
        return f"{self.name}: {total:,} tokens in {len(self):,} rows of {self.sequence_length}"


@dataclass(frozen=True)
class PackedRows:
    """Rows packed from whole documents, which ``segment_ids`` distinguish.

    Document i is ``tokens[boundaries[i]:boundaries[i + 1]]``; the index says how they are packed.
    """

    tokens: NDArray[Any]
    boundaries: NDArray[np.int64]
    index: PackingIndex
    name: str
    tokenizer: Tokenizer | None = None

    @property
    def sequence_length(self) -> int:
        """Tokens the model sees per row."""
        return self.index.row_length - 1

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return ``tokens``, ``segment_ids`` and ``positions`` [len(ids), sequence_length + 1].

        Positions after the last document are 0 in all three.
        """
        placed = place(self.index, ids)

        def spread(values: NDArray[Any]) -> NDArray[np.int32]:
            whole = np.zeros(len(ids) * self.index.row_length, np.int32)
            whole[placed.targets] = values
            return whole.reshape(len(ids), -1)

        tokens = np.asarray(self.tokens[placed.sources])
        release(self.tokens, len(ids), self.sequence_length)
        return {
            "tokens": spread(tokens),
            "segment_ids": spread(placed.segments),
            "positions": spread(placed.positions),
        }

    def fingerprint(self) -> str:
        """Return a fingerprint of the documents and how they are packed."""
        contents = tuple(array_contents([self.tokens, self.boundaries]))
        sizes = len(self.tokens), len(self.boundaries), self.sequence_length
        return fingerprint_of("packed", contents, sizes)

    def describe(self) -> str:
        """Return the number of documents and rows, and how full rows are."""
        return (
            f"{self.name}: {len(self.boundaries) - 1:,} documents of {len(self.tokens):,} tokens "
            f"in {len(self):,} rows of {self.sequence_length}, {self.index.fill:.0%} full"
        )


def documents_of(tokens: NDArray[Any], separator: int) -> HostBatch:
    """Return ``segment_ids`` and ``positions`` of rows whose documents end with a separator."""
    length = tokens.shape[1]
    begins = np.zeros(tokens.shape, bool)
    begins[:, 1:] = tokens[:, :-1] == separator
    places = np.arange(length, dtype=np.int32)
    beginnings = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return {
        "segment_ids": 1 + np.cumsum(begins, axis=1, dtype=np.int32),
        "positions": (places - beginnings).astype(np.int32),
    }


def check_length(num_rows: int, num_tokens: int, sequence_length: int, name: str) -> None:
    """Refuse data that do not fill a single row."""
    if num_rows < 1:
        raise UserError(
            f"{name} is too short" if num_tokens else f"{name} is empty",
            why=f"it has {num_tokens:,} tokens and one row takes {sequence_length + 1:,}",
            fix=f"give more data, or a smaller {Setting('data.sequence_length')}",
        )


def check_tokens(tokens: NDArray[Any], vocab_size: int | None, name: str) -> None:
    """Refuse tokens that the model has no embedding for."""
    if not tokens.size:
        return
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest >= 0 and (vocab_size is None or highest < vocab_size):
        return
    wrong = lowest if lowest < 0 else highest
    raise UserError(
        f"{name} has the token {wrong:,}, which the model does not know",
        why=f"tokens are from 0 to {(vocab_size or 2**31) - 1:,}",
        fix=f"check {Setting('data.dtype')}; if the tokens are right, train a new model with "
        f"{Setting('model.vocab_size', highest + 1)} or more, because published weights keep "
        "their vocabulary"
        if lowest >= 0
        else f"check {Setting('data.dtype')} and the file",
    )
