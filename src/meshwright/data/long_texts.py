"""Texts too long to be tokenized at once: cut where that does not change the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, Tokens

LONG = 2**22
"""Characters above which a text is cut; a tokenizer takes some hundred times their memory."""
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
        # What was tried in vain is not tried again.
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
