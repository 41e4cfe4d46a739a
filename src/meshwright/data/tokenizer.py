"""Tokenizers: bytes, or any JSON file of Hugging Face's ``tokenizers``."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.document_marks import DocumentMarks, read_marks
from meshwright.data.files import find_path
from meshwright.data.fingerprints import fingerprint_of
from meshwright.errors import Setting, UserError, missing_package

Tokens = NDArray[Any]
"""Token ids, in the smallest unsigned type that holds the vocabulary."""


class Tokenizer(ABC):
    """Turns text into tokens and back; documents start and end with its marks."""

    vocab_size: int
    marks: DocumentMarks

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, without special tokens around them."""
        return self.encode_many([text])[0]

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""

    @abstractmethod
    def encode_places(self, texts: Sequence[str]) -> list[tuple[Tokens, NDArray[np.int64]]]:
        """Return the tokens of each text, and where each begins and ends, in characters [T, 2]."""

    @abstractmethod
    def decode(self, tokens: Any) -> str:
        """Return the text of tokens; ids beyond the vocabulary are replaced or left out."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short text that changes when texts are tokenized differently."""


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8; documents end with a line break."""

    vocab_size = 256
    marks = DocumentMarks(end=(10,), text="documents end with a line break")

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_places(self, texts: Sequence[str]) -> list[tuple[Tokens, NDArray[np.int64]]]:
        """Return the bytes of each text, and the character of each."""
        found = list[tuple[Tokens, NDArray[np.int64]]]()
        for tokens in self.encode_many(texts):
            # Every byte begins a character, except those from 0x80 to 0xBF.
            character = np.cumsum((tokens & 0xC0) != 0x80) - 1
            found.append((tokens, np.stack([character, character + 1], axis=1)))
        return found

    def decode(self, tokens: Any) -> str:
        """Return the text of bytes; invalid UTF-8 becomes �."""
        return bytes(min(int(token), 255) for token in tokens).decode(errors="replace")

    def fingerprint(self) -> str:
        """Return ``bytes``."""
        return "bytes"

    @staticmethod
    def to_json() -> str:
        """Return the same as a tokenizer.json, in which a character stands for each byte."""
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in shown]
        vocabulary = {chr(byte): byte for byte in shown}
        vocabulary |= {chr(256 + n): byte for n, byte in enumerate(others)}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        level["use_regex"] = False
        model = {"type": "BPE", "vocab": vocabulary, "merges": []}
        parts = {"pre_tokenizer": level, "decoder": level, "model": model}
        empty = {"truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
        return json.dumps({"version": "1.0", **empty, "post_processor": None, **parts})


class FileTokenizer(Tokenizer):
    """A tokenizer in the JSON format of Hugging Face's ``tokenizers``."""

    def __init__(self, path: str) -> None:
        self._tokenizer, file, text = _load(path)
        self.marks = read_marks(self._tokenizer, file)
        special = sorted(map(str, self._tokenizer.get_added_tokens_decoder().values()))
        self._fingerprint = fingerprint_of(text, self.marks.start, self.marks.end, special)
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._dtype = token_dtype(self.vocab_size)

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, computed on several cores."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, self._dtype) for one in encoded]

    def encode_places(self, texts: Sequence[str]) -> list[tuple[Tokens, NDArray[np.int64]]]:
        """Return the tokens of each text, and the characters of each."""
        return [
            (np.array(one.ids, self._dtype), np.array(one.offsets, np.int64).reshape(-1, 2))
            for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens; ids beyond the vocabulary are left out."""
        known = [int(token) for token in tokens if 0 <= int(token) < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def fingerprint(self) -> str:
        """Return a fingerprint of the file's content."""
        return self._fingerprint


def load_tokenizer(path: str | None, vocab_size: int | None = None) -> Tokenizer:
    """Return the tokenizer of a JSON file; without a file, one of bytes. It must fit the model."""
    loaded = ByteTokenizer() if path is None else FileTokenizer(path)
    check_vocabulary(loaded, vocab_size)
    return loaded


def token_dtype(vocab_size: int) -> Any:
    """Return the smallest unsigned type that holds every token."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Refuse a tokenizer that has more tokens than the model."""
    if vocab_size is None or tokenizer.vocab_size <= vocab_size:
        return
    raise UserError(
        "the tokenizer does not fit the model",
        why=f"it has {tokenizer.vocab_size:,} tokens, the model's vocabulary {vocab_size:,}",
        fix=f"choose the tokenizer that the model was trained with, or train a new model with "
        f"{Setting('model.vocab_size', tokenizer.vocab_size)} or more, because published weights "
        "keep their vocabulary",
    )


def _load(path: str) -> tuple[Any, Path, bytes]:
    """Return a tokenizer, its file and its text."""
    file = find_path(path, "data.tokenizer")
    try:
        from tokenizers import Tokenizer as HuggingFaceTokenizer
    except ImportError as error:
        raise missing_package(str(Setting("data.tokenizer", path)), "tokenizers", "hf") from error
    if file.is_dir():
        file = find_path(str(file / "tokenizer.json"), "data.tokenizer")
    text = file.read_bytes()
    try:
        return HuggingFaceTokenizer.from_str(text.decode()), file, text
    except Exception as error:
        # The library raises plain exceptions for any mistake in the file.
        raise UserError(
            f"{Setting('data.tokenizer', path)} is not a tokenizer",
            why=str(error),
            fix="give a tokenizer.json of Hugging Face's `tokenizers`",
        ) from error
