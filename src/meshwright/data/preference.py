"""Preferences: prompts, each with a chosen and a rejected answer, as rows of tokens with masks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat_rows import ChatEncoder, ChatRow, ChatText, read_messages
from meshwright.data.chat_template import read_template
from meshwright.data.contents import array_contents
from meshwright.data.corrupt import OnCorrupt, with_count
from meshwright.data.document_marks import TOKEN_VERSION, TokenVersion
from meshwright.data.documents import DocumentBlock, Position
from meshwright.data.files import find_path, list_files, release
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.jsonl import JsonLines
from meshwright.data.parquet import ParquetRows
from meshwright.data.protocols import HostBatch, Source
from meshwright.data.records import RecordFiles
from meshwright.data.sentences import pair_file
from meshwright.data.token_cache import Corpus
from meshwright.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, token_dtype
from meshwright.errors import Setting, UserError
from meshwright.text.units import a_type, counted

TooLong = Literal["cut", "drop", "stop"]

_PROMPT, _SIDES = "prompt", ("chosen", "rejected")
_PARTS = 4
"""Documents of a pair in the cache: the prompt and the answer of each side."""


@dataclass(frozen=True)
class PreferenceRows:
    """Pairs of answers as rows of tokens.

    Attributes:
        tokens: prompts and answers, concatenated: those of the chosen and of the rejected side.
        boundaries: where each of them ends, after a first 0.
        pairs: the numbers of the pairs that are used.
        sequence_length: tokens the model sees per row.
        name: where the pairs come from, for messages.
        tokenizer: decodes the tokens.
    """

    tokens: NDArray[Any]
    boundaries: NDArray[np.int64]
    pairs: NDArray[np.int64]
    sequence_length: int
    name: str
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.pairs)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return ``chosen`` and ``rejected`` with their masks, [len(ids), sequence_length + 1].

        Too long a prompt loses its beginning, and too long an answer its end.
        """
        shape = len(ids), self.sequence_length + 1
        batch: HostBatch = {}
        for side in _SIDES:
            batch[side] = np.zeros(shape, np.int32)
            batch[f"{side}_mask"] = np.zeros(shape, bool)
        for row, pair in enumerate(self.pairs[ids]):
            places = self.boundaries[_PARTS * pair : _PARTS * pair + _PARTS + 1].tolist()
            parts = [self.tokens[a:b] for a, b in pairwise(places)]
            # Both answers follow the same part of the prompt.
            room = max(shape[1] - max(len(parts[1]), len(parts[3])), 1)
            for side, prompt, answer in ((0, *parts[:2]), (1, *parts[2:])):
                whole = np.concatenate([prompt[-room:], answer])[: shape[1]]
                batch[_SIDES[side]][row, : len(whole)] = whole
                batch[f"{_SIDES[side]}_mask"][row, len(prompt[-room:]) : len(whole)] = True
            release(self.tokens, 1, places[-1] - places[0])
        return batch

    def fingerprint(self) -> str:
        """Return a fingerprint of the pairs that are used and of how long rows are."""
        contents = tuple(array_contents([self.tokens, self.boundaries, self.pairs]))
        return fingerprint_of("preference", contents, self.sequence_length)

    def describe(self) -> str:
        """Return the number of pairs and tokens in one line."""
        tokens = f"{len(self.tokens):,} tokens in rows of {self.sequence_length}"
        return f"{self.name}: {counted(len(self), 'pair')} of {tokens}"


def preference_source(
    *,
    sequence_length: int,
    path: str | list[str] | None = None,
    tokenizer: str | None = None,
    too_long: TooLong = "cut",
    vocab_size: int | None = None,
    on_corrupt: OnCorrupt = "stop",
    cache_dir: str | None = None,
    token_version: TokenVersion = TOKEN_VERSION,
) -> Source:
    """Return pairs of answers from JSON Lines or Parquet, as rows of tokens.

    A record has ``prompt``, ``chosen`` and ``rejected``: texts, or lists of messages. Without a
    prompt, it is what two conversations have in common.

    Args:
        sequence_length: tokens the model sees per row.
        path: a file, a folder, a pattern, or a list of these; without one, sentences of a small
            grammar whose verbs agree with their subjects or not.
        tokenizer: a ``tokenizers`` JSON file, or its folder, whose chat template writes messages;
            without one, every byte is a token.
        too_long: what to do about a pair that is longer than a row: ``cut`` the beginning of the
            prompt, and the end of an answer that still does not fit; ``drop`` it; or ``stop``.
        vocab_size: size of the model's vocabulary, which must hold every token.
        on_corrupt: what to do about a record that cannot be read.
        cache_dir: folder for the tokens; by default the user's cache folder.
        token_version: how a tokenizer's files are read; runs keep the version they began with.
    """
    loaded = load_tokenizer(tokenizer, token_version)
    check_vocabulary(loaded, vocab_size)
    records = _records(path)
    files = list_files(records.path, records.endings)
    encoder = _encoder(loaded, tokenizer)
    corpus = Corpus(
        name="sentences with wrong and right verbs" if path is None else records.name,
        files=files,
        tokenizer=None,
        dtype=token_dtype(loaded.vocab_size),
        settings=("preference", loaded.fingerprint(), encoder.template),
        read=lambda position: _blocks(records, files, position, encoder),
        on_corrupt=on_corrupt,
    )
    entry, corrupt = corpus.entry(cache_dir)
    boundaries = entry.array("boundaries")
    kept = _fitting(boundaries, sequence_length + 1, too_long, corpus.name)
    tokens = entry.array("tokens")
    rows = PreferenceRows(tokens, boundaries, kept, sequence_length, corpus.name, loaded)
    return with_count(rows, corrupt)


class _PairRows(ParquetRows):
    """Rows of a Parquet file; conversations need no prompt."""

    def columns(self, present: list[str]) -> list[str]:
        """Return the columns to read of those that a file has."""
        return [*_SIDES, *({_PROMPT} & set(present))]


def _records(path: str | list[str] | None) -> RecordFiles:
    """Return the files of a path in the format that they have."""
    path = str(pair_file()) if path is None else path
    files = list_files(path, (*JsonLines.endings, *ParquetRows.endings))
    if any(file.name.endswith(ParquetRows.endings) for file in files):
        return _PairRows(path=path)
    return JsonLines(path=path)


def _encoder(tokenizer: Tokenizer, path: str | None) -> ChatEncoder:
    if path is None:
        return ChatEncoder(tokenizer, no_template=f"{Setting('data.tokenizer')} is not set")
    where = find_path(path, "data.tokenizer")
    folder = where if where.is_dir() else where.parent
    why = f"{folder} has no chat template"
    return ChatEncoder(tokenizer, read_template(folder), no_template=why)


def _blocks(
    records: RecordFiles, files: Sequence[Path], position: Position, encoder: ChatEncoder
) -> Iterator[DocumentBlock]:
    """Yield the prompt and the answer of each side, of every pair from a position on."""
    sizes = [file.stat().st_size for file in files]
    first, *start = position
    for number in range(first, len(files)):
        for raw in records.read_file(files[number], tuple(start)):
            texts: list[ChatText] = []
            places: list[str] = []
            skipped: list[tuple[str, str]] = []
            for count, content in raw.records:
                where = records.where(raw, count)
                try:
                    texts += _texts(records.parse(content), encoder)
                    places.append(where)
                except ValueError as error:
                    skipped.append((where, str(error)))
            rows = encoder.rows(texts)
            documents: list[NDArray[Any]] = []
            for where, chosen, rejected in zip(places, rows[::2], rows[1::2], strict=True):
                if not (chosen.teaches and rejected.teaches):
                    side = _SIDES[chosen.teaches]
                    skipped.append((where, f"`{side}` has no tokens after the prompt"))
                    continue
                documents += [part for row in (chosen, rejected) for part in _parts(row)]
            done = sum(sizes[:number]) + raw.done * sizes[number]
            yield DocumentBlock(documents, (number, *raw.after), done, skipped)
        start = []


def _texts(record: Any, encoder: ChatEncoder) -> list[ChatText]:
    """Return the texts of both sides; a ValueError says what is wrong with a record."""
    if not isinstance(record, dict):
        raise ValueError(f"it is {a_type(record)}, not an object with fields")
    for side in _SIDES:
        if record.get(side) is None:
            raise ValueError(f"it has no `{side}`, but {', '.join(map(str, record)) or 'nothing'}")
    answers = [record[side] for side in _SIDES]
    prompt = record.get(_PROMPT)
    if answers[0] == answers[1]:
        raise ValueError("`chosen` and `rejected` are the same")
    if not isinstance(prompt, list) and all(isinstance(each, list) for each in answers):
        prompt, answers = _common(*(read_messages(record[side], side) for side in _SIDES))
    elif prompt is None:
        raise ValueError("it has no `prompt`, and `chosen` and `rejected` are no conversations")
    return [
        encoder.completion(prompt, answer, (_PROMPT, side))
        for side, answer in zip(_SIDES, answers, strict=True)
    ]


def _common(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Return what two conversations begin with, and how each goes on."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if same in (0, len(chosen), len(rejected)):
        raise ValueError("`chosen` and `rejected` do not begin alike and go on differently")
    return chosen[:same], [chosen[same:], rejected[same:]]


def _parts(row: ChatRow) -> tuple[NDArray[Any], NDArray[Any]]:
    # Nothing comes before the first token, so it is never predicted.
    first = max(int(row.mask.argmax()), 1)
    return row.ids[:first], row.ids[first:]


def _fitting(
    boundaries: NDArray[np.int64], length: int, too_long: TooLong, name: str
) -> NDArray[np.int64]:
    """Return the numbers of the pairs to use, and tell about those that are too long."""
    sizes = np.diff(boundaries).reshape(-1, _PARTS)
    longest = np.maximum(sizes[:, :2].sum(axis=1), sizes[:, 2:].sum(axis=1))
    over = longest > length
    every = np.arange(len(sizes))
    if not over.any():
        return every
    many = f"{over.sum():,} of {counted(len(sizes), 'pair')} of {name}"
    why = f"rows have {length - 1:,} tokens, and the longest pair {longest.max() - 1:,}"
    if too_long == "stop" or (too_long == "drop" and over.all()):
        raise UserError(
            f"{many} are too long",
            why=why,
            fix=f"write {Setting('data.sequence_length', int(longest.max()) - 1)}, or "
            f"{Setting('data.too_long', 'cut')}",
        )
    warnings.warn(f"{many} are {'cut' if too_long == 'cut' else 'left out'}: {why}", stacklevel=2)
    return every if too_long == "cut" else every[~over]
