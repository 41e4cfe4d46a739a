"""Rows of tokens made in Python, for `Trainer.fit`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.documents import Packing
from meshwright.data.order import split_source
from meshwright.data.protocols import HostBatch, Source
from meshwright.data.text_source import text_source


class TokenData:
    """Rows of tokens by number.

    Attributes:
        source: the rows.
    """

    def __init__(self, source: Source) -> None:
        self.source: Any = source

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the rows."""
        return getattr(self.source, "tokenizer", None)

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the rows with these numbers."""
        return self.source.rows(ids)

    def fingerprint(self) -> str:
        """Return a short text that changes when the rows do."""
        return self.source.fingerprint()

    def describe(self) -> str:
        """Return a description in one line."""
        return self.source.describe()

    def split(self, fraction: float = 0.02) -> tuple[Source, Source | None]:
        """Return the rows to train on, and about ``fraction`` of all, held out.

        Which rows are held out depends on their numbers alone.
        """
        return split_source(self.source, fraction)


class TextData(TokenData):
    """The text of files as rows of tokens.

    Args:
        path: a file, a folder, a pattern, or a list of these; without one, sentences of a small
            grammar.
        sequence_length: tokens the model sees per row.
        tokenizer: a ``tokenizers`` JSON file or its folder; without one, every byte is a token.
        packing: ``stream`` cuts rows from all files joined together; ``documents`` keeps files
            apart.
        vocab_size: size of the model's vocabulary, which must hold every token.
        cache_dir: folder for the tokens; by default the user's cache folder.
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        *,
        sequence_length: int,
        tokenizer: str | None = None,
        packing: Packing = "stream",
        vocab_size: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            text_source(
                path=path,
                sequence_length=sequence_length,
                tokenizer=tokenizer,
                packing=packing,
                vocab_size=vocab_size,
                cache_dir=cache_dir,
            )
        )
