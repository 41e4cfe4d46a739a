"""Conversations: files of messages, of prompts with completions, or of texts, as rows of tokens."""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.config.argument_checks import clear_arguments
from meshwright.data.chat_rows import ASSISTANT, CONVERT, ChatEncoder, ChatText, LossOn
from meshwright.data.chat_template import ChatTemplate, no_template, read_template, special_tokens
from meshwright.data.corrupt import OnCorrupt, with_count
from meshwright.data.document_marks import files_of
from meshwright.data.documents import Document
from meshwright.data.files import find_path, list_files
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.packing import Ints, best_fit_parts
from meshwright.data.protocols import HostBatch, Source
from meshwright.data.record_formats import JsonLines, ParquetRows
from meshwright.data.records import RecordFiles, document_blocks
from meshwright.data.token_cache import Corpus, packed, tell
from meshwright.data.token_rows import PackedRows
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import ANY, Setting, UserError
from meshwright.runtime.host_machine import user_cache
from meshwright.text.json_text import write_atomically
from meshwright.text.units import a_type, counted

TooLong = Literal["cut", "drop", "stop"]
"""What happens to a conversation longer than a row: its end is cut off, it is left out, or the run
does not start."""

ChatPacking = Literal["auto", "best_fit", "none"]
"""Whether rows hold several conversations: if the model is known to keep them apart, yes, or no."""

TODAY = "2025-01-01"
"""The date for templates that write today's: the tokens of a run must not change overnight."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template ``chatml``, for models that have none."""


def chat_source(
    *,
    sequence_length: int,
    path: str | list[str] | None = None,
    records: Iterable[Mapping[str, Any]] | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    loss_on: LossOn = "assistant",
    too_long: TooLong = "cut",
    packing: ChatPacking = "auto",
    mixes: Callable[[], str] | None = None,
    messages: str = "messages",
    prompt: str = "prompt",
    completion: str = "completion",
    text: str = "text",
    role: str = "role",
    content: str = "content",
    vocab_size: int | None = None,
    on_corrupt: OnCorrupt = "stop",
    cache_dir: str | None = None,
) -> Source:
    """Return conversations as rows of tokens, of which only what the assistant says is learned.

    Args:
        sequence_length: tokens the model sees per row.
        path: a JSON Lines or Parquet file, a folder, a pattern, or a list of these. Records have
            ``messages``, ``prompt`` and ``completion``, or ``text``.
        records: in Python, the records themselves instead of a path.
        tokenizer: a ``tokenizers`` JSON file or its folder; without one, every byte is a token.
        template: the chat template: a file or folder, ``chatml``, or its text; by default that
            beside the tokenizer.
        template_arguments: further variables of the template.
        loss_on: learn every turn of the ``assistant``, the ``last``, or ``all`` tokens. Of a
            prompt with a completion, the completion is learned.
        too_long: ``cut`` conversations longer than a row, ``drop`` them, or ``stop``.
        packing: ``best_fit`` puts several conversations into a row, ``none`` gives each its own;
            ``auto`` packs them if the model is known to keep them apart.
        mixes: says why the model would not; empty if it does. None if it is not known.
        messages: the field with the messages.
        prompt: the field with the prompt: text, or messages.
        completion: the field with what follows the prompt.
        text: the field with a text, all of which is learned.
        role: the field of a message with who says it; human is a user, and gpt an assistant, if it
            is another than ``role``.
        content: the field of a message with what is said.
        vocab_size: size of the model's vocabulary, which must hold every token.
        on_corrupt: what to do about a record that is not a conversation.
        cache_dir: folder for the tokens; by default the user's cache folder.
    """
    loaded = load_tokenizer(tokenizer, vocab_size)
    found = find_template(template, tokenizer, template_arguments)
    encoder = ChatEncoder(loaded, found, loss_on, (role, content))
    apart = _packs(packing, mixes)
    fields = ChatFields(messages, prompt, completion, text)
    corpus = _corpus(path, records, fields, encoder, on_corrupt)
    return _rows(corpus, encoder, cache_dir, sequence_length, too_long, apart)


def _packs(packing: ChatPacking, mixes: Callable[[], str] | None) -> bool:
    """Return whether several conversations share a row, and say why not."""
    why = "" if mixes is None or packing == "none" else mixes()
    if packing == "best_fit" and why:
        raise UserError(
            f"{Setting('data.packing', packing)} does not fit the model",
            why=why,
            fix=f"write {Setting('data.packing', 'none')}, or give its call the parameters "
            "`segment_ids` and `positions`",
        )
    if packing == "auto" and (mixes is None or why):
        tell(f"conversations have a row each: {why or 'the model is not known here'}")
    return packing == "best_fit" or (packing == "auto" and mixes is not None and not why)


ChatData = clear_arguments("mw.ChatData")(chat_source)


@dataclass(frozen=True)
class ChatFields:
    """The names of the fields of a record."""

    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    text: str = "text"

    def read(self, record: Any, encoder: ChatEncoder) -> ChatText:
        """Return a record as text; a ValueError says what is wrong with it."""
        if not isinstance(record, Mapping):
            raise ValueError(f"it is {a_type(record)}, not an object with fields")
        known = {key: value for key, value in record.items() if value is not None}
        more = {"tools": known["tools"]} if "tools" in known else {}
        if self.messages in known:
            made = encoder.conversation(known[self.messages], self.messages, **more)
        elif self.prompt in known and self.completion in known:
            names = (self.prompt, self.completion)
            made = encoder.completion(known[names[0]], known[names[1]], names, **more)
        elif self.text in known:
            made = encoder.text(known[self.text], self.text)
        else:
            own = ", ".join(f"`{key}`" for key in known) or "nothing"
            raise ValueError(
                f"it has neither `{self.messages}`, nor `{self.prompt}` with `{self.completion}`, "
                f"nor `{self.text}`, but {own}{CONVERT if 'conversations' in known else ''}"
            )
        if not any(begin < end for begin, end in made.learned):
            raise ValueError("it has no turn of the assistant, so there is nothing to learn")
        return made


@dataclass(frozen=True)
class LearnedRows(PackedRows):
    """Rows of conversations; tokens that are learned are stored as their complements, below 0.

    Rows are ``apart`` if they hold several conversations, which ``segment_ids`` tell apart.
    """

    apart: bool = True
    template: ChatTemplate | None = None

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the fields of `PackedRows`, and ``mask`` [len(ids), sequence_length]."""
        batch = super().rows(ids)
        stored, first = batch["tokens"], batch["positions"][:, 1:] == 0
        mask = (stored[:, 1:] < 0) & ~first
        batch |= {
            "tokens": np.where(stored < 0, ~stored, stored),
            "mask": mask.astype(np.float32),
            # The last token is only a target.
            "positions": np.minimum(batch["positions"], self.sequence_length - 1),
        }
        if not self.apart:
            del batch["segment_ids"], batch["positions"]
        return batch

    def fingerprint(self) -> str:
        """Return a fingerprint of the conversations and how they are packed."""
        return fingerprint_of("chat", super().fingerprint(), self.apart, len(self.index.starts))


def find_template(
    given: str | None, tokenizer: str | None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Return the chat template of some data; None if there is none.

    Without one that is given, it is that beside the tokenizer, if that is a tokenizer.json.
    """
    path = None if tokenizer is None else Path(tokenizer).expanduser()
    if path is not None and not path.is_dir():
        path = path.parent if path.name == "tokenizer.json" else None
    found = read_template(path)
    if given is not None:
        tokens = special_tokens(files_of(path), path)
        found = ChatTemplate(_given_text(given), tokens, str(Setting("data.template")))
    if found is None:
        return None
    found = replace(found, arguments=dict(arguments or {}), today=TODAY)
    found.check()
    return found


def _given_text(given: str) -> str:
    """Return the text of the template that a setting names, or is."""
    if given == "chatml":
        return CHATML
    if "{{" in given or "{%" in given:
        return given
    path = find_path(given, "data.template")
    if not path.is_dir():
        return path.read_text(encoding="utf-8")
    found = read_template(path)
    if found is None:
        raise no_template(path, f"write {Setting('data.template', ANY)} with a file that is one")
    return found.text


class _Tables(ParquetRows):
    """Parquet files of conversations, whose columns are all read."""

    def columns(self, file: Path, present: list[str]) -> list[str]:
        return present


def chat_files(path: str | list[str]) -> tuple[RecordFiles, list[Path]]:
    """Return how to read the files, and the files."""
    files = list_files(path, (*JsonLines.endings, *ParquetRows.endings))
    tables = {file.name.lower().endswith(ParquetRows.endings) for file in files}
    if len(tables) > 1:
        raise UserError(
            f"{Setting('data.path', path)} has JSON Lines and Parquet files",
            fix="give files of one kind, or mix both with data=mixture",
        )
    return (_Tables if tables == {True} else JsonLines)(path=path), files


def written_records(records: Iterable[Mapping[str, Any]] | None) -> str:
    """Write records to a file of the cache, where all processes find them; return its path."""
    if records is None:
        raise UserError(f"`{Setting('data.path')}` is missing", fix="name a file of conversations")
    text = "".join(f"{json.dumps(dict(record), ensure_ascii=False)}\n" for record in records)
    path = user_cache("records") / f"{fingerprint_of(text)}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return str(path)


def _corpus(
    path: str | list[str] | None,
    records: Iterable[Mapping[str, Any]] | None,
    fields: ChatFields,
    encoder: ChatEncoder,
    on_corrupt: OnCorrupt,
) -> Corpus:
    """Return the conversations as a corpus, whose documents have all their tokens already."""
    reader, files = chat_files(written_records(records) if path is None else path)
    name = "the records" if path is None else str(Setting("data.path", path))

    def finish(texts: list[ChatText]) -> Sequence[Document]:
        rows = encoder.rows(texts)
        if joined := sum(row.joined for row in rows):
            warnings.warn(
                f"in {counted(joined, 'conversation')} of {name}, a prompt alone has other tokens "
                "than before its answer, which is learned from where they differ: end prompts "
                "without a space, and begin answers with it, or take a template that writes both "
                "alike",
                stacklevel=2,
            )
        return [np.where(row.mask, ~row.ids, row.ids) for row in rows]

    keys = ("data.messages", "data.prompt", "data.completion", "data.text")
    tokenizer = encoder.tokenizer
    own = (fields,) if encoder.keys == ("role", "content") else (fields, encoder.keys)
    return Corpus(
        name=name,
        files=files,
        tokenizer=None,
        dtype=np.int32,
        settings=("chat", tokenizer.fingerprint(), encoder.template, encoder.loss_on, *own),
        read=lambda position: document_blocks(
            reader, files, position, lambda record: fields.read(record, encoder), finish
        ),
        on_corrupt=on_corrupt,
        wrong=(
            "is not a conversation",
            f"correct the record, name its fields ({', '.join(str(Setting(k)) for k in keys)})",
        ),
    )


def _rows(
    corpus: Corpus,
    encoder: ChatEncoder,
    cache_dir: str | None,
    sequence_length: int,
    too_long: TooLong,
    apart: bool,
) -> Source:
    """Return conversations as rows; say how many do not fit."""
    entry, corrupt = corpus.cached(cache_dir)
    tokens, boundaries = entry.array("tokens"), entry.array("boundaries")
    row_length = sequence_length + 1
    lengths = np.diff(boundaries)
    long = int((lengths > row_length).sum())
    if long and too_long == "stop":
        raise UserError(
            f"{counted(long, 'conversation')} of {corpus.name} do not fit into a row",
            why=f"the longest has {int(lengths.max()):,} tokens, and a row takes {row_length:,}",
            fix=f"write {Setting('data.too_long', 'cut', 'drop')}, or a larger "
            f"{Setting('data.sequence_length')}",
        )

    def keep(starts: Ints, own: Ints) -> NDArray[np.bool_]:
        ends = starts + np.minimum(own, row_length)
        learned = [(tokens[s + 1 : e] < 0).any() for s, e in zip(starts, ends, strict=True)]
        return np.array(learned, bool) & ((own <= row_length) | (too_long != "drop"))

    parts = partial(best_fit_parts, boundaries, row_length, keep, alone=not apart)
    suffix = f"{too_long}-{'best' if apart else 'single'}-rows-of-{row_length}"
    index = packed(entry, suffix, parts, row_length, corpus.name)
    empty = len(lengths) - len(index.starts) - (long if too_long == "drop" else 0)
    bare = _empty_answers(encoder, tokens, boundaries)
    done = "dropped" if too_long == "drop" else "cut"
    facts = {
        f"longer than a row of {row_length:,} tokens, and {done}": long,
        "without anything to learn within a row, and left out": empty,
        "with an empty answer, of which only the end is learned": bare,
    }
    for what, count in facts.items():
        if count:
            tell(f"{what}: {count:,} of {len(lengths):,} conversations of {corpus.name}")
    if not len(index):
        raise UserError(
            f"{corpus.name} leaves nothing to learn",
            why=f"of {counted(len(lengths), 'conversation')}, {long:,} do not fit into a row of "
            f"{row_length:,} tokens",
            fix=f"write a larger {Setting('data.sequence_length')}",
        )
    rows = LearnedRows(
        tokens, boundaries, index, corpus.name, encoder.tokenizer, apart, encoder.template
    )
    return with_count(rows, corrupt)


def _empty_answers(encoder: ChatEncoder, tokens: Ints, boundaries: Ints) -> int:
    """Return how many conversations have an answer of which only the end of the turn is learned."""
    said = [{"role": role, "content": text} for role, text in (("user", "a"), (ASSISTANT, ""))]
    try:
        row = encoder.row(encoder.conversation(said))
    except (UserError, ValueError):
        return 0
    end, learned = ~row.ids[row.mask], tokens < 0
    learned[boundaries[:-1]] = False
    begins, ends = np.flatnonzero(np.diff(learned, prepend=False, append=False)).reshape(-1, 2).T
    begins = begins[ends - begins == len(end)]
    begins = begins[(tokens[begins[:, None] + np.arange(len(end))] == end).all(axis=1)]
    return len(np.unique(np.searchsorted(boundaries, begins, side="right")))
