"""What a folder says about generating text: tokenizer, stop tokens, sampling, chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint import FOLDER
from meshwright.data.chat_rows import LossOn
from meshwright.data.chat_template import ChatTemplate, no_template, read_template
from meshwright.data.document_marks import Files, files_of, named_ends, object_in
from meshwright.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from meshwright.errors import UserError
from meshwright.text.yaml_text import read_yaml
from meshwright.weights.hf_folder import CONFIG, GENERATION, TOKENIZER, is_hf_folder
from meshwright.weights.kept import HF_FOLDER
from meshwright.weights.resolve import BYTES_WITHOUT_TOKENIZER

HALF = {"bf16": "bfloat16", "fp16": "float16"}
"""Formats of 16 bits by their names in `precision`."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class TextSettings:
    """The files of a folder, or of a run, that say how to generate text.

    Attributes:
        folder: where the files are; None without any.
        bytes_are_tokens: whether the model was trained on bytes.
        dtype: the format of 16 bits that the run computed in, or that the folder's config.json
            names; None for float32.
        answers: whether texts are answers, which end as the chat template ends them.
        loss_on: what the run learned of conversations.
        completion: the most tokens of a completion, if the run learned from rewards.
    """

    folder: Path | None = None
    bytes_are_tokens: bool = False
    dtype: str | None = None
    answers: bool = False
    loss_on: LossOn = "assistant"
    completion: int | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if there is none."""
        file = None if self.folder is None else self.folder / TOKENIZER
        if file is not None and file.is_file():
            return FileTokenizer(str(file))
        return ByteTokenizer() if self.bytes_are_tokens else None

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        named = [token for token, _ in named_ends(self.file)]
        own = self.tokenizer.marks.end[-1:] if isinstance(self.tokenizer, FileTokenizer) else ()
        return tuple(dict.fromkeys([*named, *own, *self._turn_end[0]]))

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text."""
        return self._turn_end[1]

    @cached_property
    def _turn_end(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return turn_stops(self.chat, TextTokens(self.tokenizer)) if self.answers else ((), ())

    @cached_property
    def sampling(self) -> dict[str, Any]:
        """The settings of sampling that generation_config.json has; at temperature 0 if none."""
        values = object_in(self.file, GENERATION, self.folder)
        if not values.get("do_sample"):
            penalty = values.get("repetition_penalty")
            return {} if penalty is None else {"repetition_penalty": penalty}
        found = {key: values[key] for key in _SAMPLING if values.get(key) is not None}
        return {"temperature": 1.0, **found}

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template."""
        found = read_template(self.folder)
        if found is None:
            fix = "use a model that was trained on conversations, or --prompt without --chat"
            raise no_template(self.folder, fix)
        return found

    @cached_property
    def file(self) -> Files:
        """Returns the content of a file by its name; None if there is none."""
        return files_of(self.folder)


def read_text_settings(path: str | Path) -> TextSettings:
    """Return what a Hugging Face folder, a run folder or one of its checkpoints says."""
    path = Path(path)
    for folder in (path, *path.absolute().parents[:2]):
        config = folder / "config.yaml"
        if (folder / FOLDER).is_dir() or config.is_file():
            values: Any = read_yaml(config.read_text()) if config.is_file() else None
            kind, tokenizer = (_at(values, "data", key) for key in ("kind", "tokenizer"))
            named = ("precision", "compute"), ("training", "mixed_precision")
            asked = next(filter(None, (_at(values, *path) for path in named)), None)
            bytes_are_tokens = kind in BYTES_WITHOUT_TOKENIZER and not tokenizer
            found = TextSettings(folder / HF_FOLDER, bytes_are_tokens, HALF.get(str(asked)))
            rewarded = _at(values, "grpo", "rewards")
            return replace(
                found,
                loss_on=_at(values, "data", "loss_on") or "assistant",
                completion=_at(values, "generation", "max_generation_steps") if rewarded else None,
            )
        if (folder / TOKENIZER).is_file() or is_hf_folder(folder):
            found = TextSettings(folder)
            values = object_in(found.file, CONFIG, folder)
            dtypes = [_at(values, *part, key) for part in ((), ("text_config",)) for key in _DTYPES]
            return replace(found, dtype=next((d for d in dtypes if d in HALF.values()), None))
    return TextSettings(path)


def turn_stops(template: ChatTemplate, text: TextTokens) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the token that ends an answer, or else the text that does."""
    end = template.turn_end
    if text.tokenizer is not None and end:
        ids, after_space = (text.encode(each, start=False).tolist() for each in (end, f". {end}"))
        if text.decode(ids) == end and ids == after_space[-1:]:
            return tuple(ids), ()
    return (), (end,) if end else ()


def ends_of(named: Sequence[int], tokenizer: Any) -> list[int]:
    """Return the tokens that end a completion: those that are named, or the tokenizer's own."""
    own = tokenizer.marks.end[-1:] if isinstance(tokenizer, Tokenizer) else ()
    return [*(named or own)]


def _at(values: Any, *keys: str) -> Any:
    """Return what is at a path of keys; None if nothing is."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


@dataclass(frozen=True)
class TextTokens:
    """Text to tokens and back, by a tokenizer of Meshwright, `tokenizers` or transformers, if any.

    ``where`` it was looked for is for the message without one.
    """

    tokenizer: Any = None
    where: str = ""

    def encode(self, text: str, *, start: bool = True) -> NDArray[np.int32]:
        """Return the tokens of a text; with `start`, after what documents start with."""
        if self.tokenizer is None:
            raise UserError(
                "the prompt is text, but there is no tokenizer",
                why=self.where,
                fix="give token ids, or a tokenizer.json: in the folder, or as tokenizer= in "
                "Python",
            )
        if isinstance(self.tokenizer, Tokenizer):
            before = self.tokenizer.marks.start if start else ()
            return np.array([*before, *self.tokenizer.encode(text)], np.int32)
        encoded = self.tokenizer.encode(text, add_special_tokens=start)
        return np.array(getattr(encoded, "ids", encoded), np.int32)

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens, special ones included."""
        ids = [int(token) for token in tokens]
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer.decode(ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def continuation(self, before: Any, new: Any) -> str:
        """Return the text that tokens add after others; a space between the two belongs to it."""
        start = list(before)[-8:]
        text, whole = self.decode(start), self.decode([*start, *new])
        return whole[len(text) :] if whole.startswith(text) else self.decode(new)


def printable(text: str) -> str:
    """Return text without control characters, which would affect a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
