"""Documents as tokens: collected from texts or token lists, then cut or packed into rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.protocols import Source
from meshwright.data.token_rows import PackedRows, StreamRows
from meshwright.data.tokenizer import Tokenizer, token_dtype
from meshwright.errors import UserError

Packing = Literal["stream", "documents"]
"""``stream`` cuts rows from all documents joined together; ``documents`` keeps them apart."""

CHUNK = 1024
"""Documents tokenized at a time: enough to keep several cores busy."""


@dataclass
class Documents:
    """Tokenized documents, in order.

    Attributes:
        tokenizer: tokenizes texts; None if documents come as tokens.
        vocab_size: upper bound of the tokens, exclusive; None if it is not known.
    """

    tokenizer: Tokenizer | None
    vocab_size: int | None
    _texts: list[str] = field(default_factory=list)
    _chunks: list[NDArray[Any]] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)

    def add_text(self, text: str) -> None:
        """Add a document of text."""
        self._texts.append(text)
        if len(self._texts) >= CHUNK:
            self._encode()

    def add_tokens(self, documents: Iterable[NDArray[Any]]) -> None:
        """Add documents of tokens, each followed by the end-of-document token if there is one."""
        separator = None if self.tokenizer is None else self.tokenizer.separator
        end = [] if separator is None else [separator]
        dtype = token_dtype(self.vocab_size or 2**31)
        ended = [np.append(tokens, end).astype(dtype) for tokens in documents if len(tokens)]
        if ended:
            self._chunks.append(np.concatenate(ended))
            self._lengths += map(len, ended)

    def into_rows(self, packing: Packing, sequence_length: int, name: str) -> Source:
        """Return the documents as rows of tokens."""
        self._encode()
        if not self._chunks:
            raise UserError(f"{name} is empty", why="there is no document with any content")
        tokens = np.concatenate(self._chunks)
        if packing == "stream":
            return StreamRows([tokens], sequence_length, name, self.tokenizer)
        boundaries = np.concatenate([[0], np.cumsum(self._lengths)])
        return PackedRows(tokens, boundaries, sequence_length, name, self.tokenizer)

    def _encode(self) -> None:
        if self._texts:
            assert self.tokenizer is not None, "text needs a tokenizer"
            self.add_tokens(self.tokenizer.encode_many(self._texts))
            self._texts.clear()
