"""Text: the user's files, or the source code of the Python standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from meshwright.data.corrupt import CorruptRecords, OnCorrupt
from meshwright.data.documents import Documents, Packing
from meshwright.data.files import list_files, read_bytes
from meshwright.data.protocols import Source
from meshwright.data.records import with_count
from meshwright.data.tokenizer import check_vocabulary, load_tokenizer
from meshwright.errors import Setting

CORPUS_BYTES = 16 * 2**20
"""How much of the standard library is read: enough for a demonstration, quick to load."""


def text_source(
    *,
    sequence_length: int,
    path: str | None = None,
    tokenizer: str | None = None,
    packing: Packing = "stream",
    vocab_size: int | None = None,
    on_corrupt: OnCorrupt = "stop",
) -> Source:
    """Return the text of a file, or of all files in a folder, as rows of tokens.

    Args:
        sequence_length: tokens the model sees per row.
        path: a file or folder; without one, the source code of the Python standard library.
        tokenizer: a ``tokenizers`` JSON file; without one, every byte is a token.
        packing: ``stream`` cuts rows from all files joined together; ``documents`` keeps files
            apart.
        vocab_size: size of the model's vocabulary, which must hold every token.
        on_corrupt: what to do about a file that is not UTF-8, which a tokenizer needs.
    """
    loaded = load_tokenizer(tokenizer)
    check_vocabulary(loaded, vocab_size)
    documents = Documents(loaded, loaded.vocab_size)
    corrupt = CorruptRecords(on_corrupt)
    for file in _standard_library() if path is None else list_files(path):
        content = read_bytes(file)
        if tokenizer is None:
            documents.add_tokens([np.frombuffer(content, np.uint8)])
            continue
        try:
            documents.add_text(content.decode())
        except UnicodeDecodeError as error:
            corrupt.add(str(file), f"it is not UTF-8: {error.reason} at byte {error.start:,}")
    name = "the Python standard library" if path is None else str(Setting("data.path", path))
    return with_count(documents.into_rows(packing, sequence_length, name), corrupt)


def _standard_library() -> Iterator[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in file.parts and total < CORPUS_BYTES:
            total += file.stat().st_size
            yield file
