"""Preferences: prompts, each with a chosen and a rejected answer, as rows of tokens with masks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config.argument_checks import clear_arguments
from meshwright.data.chat_rows import ChatEncoder, ChatText, read_messages
from meshwright.data.chat_source import TooLong, chat_files, find_template, written_records
from meshwright.data.contents import array_contents
from meshwright.data.corrupt import OnCorrupt, with_count
from meshwright.data.documents import Document
from meshwright.data.files import release
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import HostBatch, Source
from meshwright.data.records import document_blocks
from meshwright.data.sentences import pair_file
from meshwright.data.token_cache import Corpus, tell
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import Setting, UserError
from meshwright.text.units import a_type, counted

_PROMPT, _SIDES = "prompt", ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceRows:
    """Pairs of answers as rows of tokens.

    Attributes:
        tokens: the chosen and the rejected side of each pair, with their prompt; tokens of answers
            are stored as their complements, below 0.
        boundaries: where each side ends, after a first 0.
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
        batch: HostBatch = {side: np.zeros(shape, np.int32) for side in _SIDES}
        batch |= {f"{side}_mask": np.zeros(shape, bool) for side in _SIDES}
        for row, pair in enumerate(self.pairs[ids]):
            begin, middle, end = self.boundaries[2 * pair : 2 * pair + 3].tolist()
            sides = self.tokens[begin:middle], self.tokens[middle:end]
            # Both answers follow the same part of the prompt.
            room = max(shape[1] - max(int((each < 0).sum()) for each in sides), 1)
            for side, stored in zip(_SIDES, sides, strict=True):
                first = int(np.argmax(stored < 0))
                own = stored[max(first - room, 0) :][: shape[1]]
                batch[side][row, : len(own)] = np.where(own < 0, ~own, own)
                batch[f"{side}_mask"][row, : len(own)] = own < 0
            release(self.tokens, 1, end - begin)
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
    records: Iterable[Mapping[str, Any]] | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
    too_long: TooLong = "cut",
    vocab_size: int | None = None,
    on_corrupt: OnCorrupt = "stop",
    cache_dir: str | None = None,
) -> Source:
    """Return prompts with a chosen and a rejected answer each, as rows of tokens.

    A record has ``prompt``, ``chosen`` and ``rejected``: texts, or lists of messages. Two whole
    conversations need no prompt: it is what they have in common.

    Args:
        sequence_length: tokens the model sees per row.
        path: a JSON Lines or Parquet file, a folder, a pattern, or a list of these; without one,
            sentences of a small grammar whose verbs agree with their subjects, or do not.
        records: in Python, the records themselves instead of a path.
        tokenizer: a ``tokenizers`` JSON file or its folder; without one, every byte is a token.
        template: the chat template: a file or folder, ``chatml``, or its text; by default that
            beside the tokenizer.
        too_long: ``cut`` the beginning of prompts, and the end of answers that still do not fit
            into a row; ``drop`` such pairs; or ``stop``.
        vocab_size: size of the model's vocabulary, which must hold every token.
        on_corrupt: what to do about a record that is not such a pair.
        cache_dir: folder for the tokens; by default the user's cache folder.
    """
    loaded = load_tokenizer(tokenizer, vocab_size)
    encoder = ChatEncoder(loaded, find_template(template, tokenizer))
    built_in = path is None and records is None
    given = path if path is not None else None if built_in else written_records(records)
    reader, files = chat_files(str(pair_file()) if given is None else given)
    name = "the records" if path is None else str(Setting("data.path", path))

    corpus = Corpus(
        name="sentences with right and wrong verbs" if built_in else name,
        files=files,
        tokenizer=None,
        dtype=np.int32,
        settings=("preference", loaded.fingerprint(), encoder.template),
        read=lambda position: document_blocks(
            reader,
            files,
            position,
            lambda record: _read(record, encoder),
            lambda pairs: _marked(pairs, encoder),
        ),
        on_corrupt=on_corrupt,
        wrong=("is not a pair of answers", "correct the record"),
    )
    entry, corrupt = corpus.cached(cache_dir)
    tokens, boundaries = entry.array("tokens"), entry.array("boundaries")
    kept = _fitting(tokens, boundaries, sequence_length + 1, too_long, corpus.name)
    rows = PreferenceRows(tokens, boundaries, kept, sequence_length, corpus.name, loaded)
    return with_count(rows, corrupt)


def _marked(pairs: list[list[ChatText]], encoder: ChatEncoder) -> Sequence[Document]:
    """Return the tokens of both answers of each pair; those that are learned are inverted."""
    rows = encoder.rows([text for pair in pairs for text in pair])
    # Nothing comes before the first token, so it is never learned.
    learned = [row.mask & (np.arange(len(row.mask)) > 0) for row in rows]
    return [np.where(own, ~row.ids, row.ids) for row, own in zip(rows, learned, strict=True)]


PreferenceData = clear_arguments("mw.PreferenceData")(preference_source)


def _read(record: Any, encoder: ChatEncoder) -> list[ChatText]:
    """Return the texts of both sides; a ValueError says what is wrong with a record."""
    if not isinstance(record, Mapping):
        raise ValueError(f"it is {a_type(record)}, not an object with fields")
    known = {str(key): value for key, value in record.items() if value is not None}
    lists = [isinstance(known.get(side), list) for side in _SIDES]
    for side in _SIDES if all(lists) else (_PROMPT, *_SIDES):
        if side not in known:
            own = ", ".join(f"`{key}`" for key in known) or "nothing"
            raise ValueError(f"it has no `{side}`, but {own}")
    prompt, answers = known.get(_PROMPT), [known[side] for side in _SIDES]
    if answers[0] == answers[1]:
        raise ValueError("`chosen` and `rejected` are the same")
    if all(lists) and not isinstance(prompt, list):
        prompt, answers = _common(*(read_messages(known[side], side) for side in _SIDES))
    texts = [
        encoder.completion(prompt, answer, (_PROMPT, side))
        for side, answer in zip(_SIDES, answers, strict=True)
    ]
    for side, text in zip(_SIDES, texts, strict=True):
        if not any(begin < end for begin, end in text.learned):
            raise ValueError(f"`{side}` is empty")
    return texts


def _common(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Return what two conversations begin with, and how each goes on."""
    differ = (n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1])
    same = next(differ, 0)
    if not same:
        raise ValueError("`chosen` and `rejected` do not begin alike and go on differently")
    return chosen[:same], [chosen[same:], rejected[same:]]


def _fitting(
    tokens: NDArray[Any], boundaries: NDArray[np.int64], length: int, too_long: TooLong, name: str
) -> NDArray[np.int64]:
    """Return the numbers of the pairs to use, and tell about the others."""
    longest = np.diff(boundaries).reshape(-1, 2).max(axis=1)
    answers = np.add.reduceat(tokens < 0, boundaries[:-1]).reshape(-1, 2)
    over, empty = longest > length, answers.min(axis=1) == 0
    every = counted(len(longest), "pair")
    why = f"the longest has {int(longest.max()):,} tokens, and a row takes {length:,}"
    kept = ~empty & ~over if too_long == "drop" else ~empty
    if (over.any() and too_long == "stop") or not kept.any():
        raise UserError(
            f"{int(over.sum()):,} of {every} of {name} do not fit into a row",
            why=why,
            fix=f"write {Setting('data.too_long', 'cut')}, or a larger "
            f"{Setting('data.sequence_length')}",
        )
    if over.any():
        done = "cut" if too_long == "cut" else "left out"
        tell(f"{int(over.sum()):,} of {every} of {name} are {done}: {why}")
    if empty.any():
        tell(f"{int(empty.sum()):,} of {every} of {name} have no tokens of an answer: left out")
    return np.flatnonzero(kept)
