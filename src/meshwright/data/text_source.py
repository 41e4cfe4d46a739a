"""Text: the user's files, or sentences of a small grammar."""

import codecs
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from meshwright.config.argument_checks import clear_arguments
from meshwright.data.corrupt import OnCorrupt
from meshwright.data.documents import LONG, DocumentBlock, Packing, Position, pieces
from meshwright.data.files import list_files
from meshwright.data.protocols import Source
from meshwright.data.sentences import sentence_file
from meshwright.data.token_cache import Corpus
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, token_dtype
from meshwright.errors import Setting, UserError

READ_BYTES = 2**21


def text_source(
    *,
    sequence_length: int,
    path: str | list[str] | None = None,
    tokenizer: str | None = None,
    packing: Packing = "stream",
    vocab_size: int | None = None,
    on_corrupt: OnCorrupt = "stop",
    cache_dir: str | None = None,
) -> Source:
    """Return the text of a file, or of several files, as rows of tokens.

    Args:
        sequence_length: tokens the model sees per row.
        path: a file, a folder, a pattern, or a list of these; without one, sentences of a
            small grammar, which a small model learns in a minute.
        tokenizer: a ``tokenizers`` JSON file; without one, every byte is a token.
        packing: ``stream`` cuts rows from all files joined together; ``documents`` keeps files
            apart.
        vocab_size: size of the model's vocabulary, which must hold every token.
        on_corrupt: what to do about a file that is not UTF-8, which a tokenizer needs.
        cache_dir: folder for the tokens; by default the user's cache folder.
    """
    loaded = load_tokenizer(tokenizer, vocab_size)
    files = [sentence_file()] if path is None else list_files(path)
    corpus = Corpus(
        name="sentences of a small grammar" if path is None else str(Setting("data.path", path)),
        files=files,
        tokenizer=loaded,
        dtype=token_dtype(loaded.vocab_size),
        settings=("text",),
        read=lambda position: _blocks(files, loaded, position),
        on_corrupt=on_corrupt,
    )
    return corpus.rows(cache_dir, packing, sequence_length)


TextData = clear_arguments("mw.TextData")(text_source)


def _blocks(
    files: Sequence[Path], tokenizer: Tokenizer, position: Position
) -> Iterator[DocumentBlock]:
    """Yield the text of each file from a position on: the number of a file, and 1 after it."""
    done = 0
    for number, file in enumerate(files):
        size = file.stat().st_size
        if (number, 0) >= (*position, 0)[:2]:
            try:
                if isinstance(tokenizer, ByteTokenizer):
                    yield from _raw(file, number, done)
                else:
                    yield from _decoded(file, number, done, size, tokenizer)
            except OSError as error:
                raise UserError(f"cannot read {file}", why=str(error)) from error
        done += size


def _raw(file: Path, number: int, done: int) -> Iterator[DocumentBlock]:
    """Yield the bytes of a file, which are its tokens."""
    with open(file, "rb") as content:
        parts = iter(lambda: content.read(READ_BYTES), b"")
        for part, following in pairwise(chain(parts, [b""])):
            done += len(part)
            is_piece = bool(following) or content.tell() > READ_BYTES
            tokens = np.frombuffer(part, np.uint8)
            yield DocumentBlock([tokens], (number, 1), done, (), is_piece, bool(following))


def _decoded(
    file: Path, number: int, done: int, size: int, tokenizer: Tokenizer
) -> Iterator[DocumentBlock]:
    """Yield the text of a file: whole, or in pieces if it is long."""
    try:
        if size <= LONG:
            text = file.read_bytes().decode()
            yield DocumentBlock([text] if text else [], (number, 1), done + size)
            return
        # A file that is not UTF-8 further down is skipped whole.
        for _ in _text_parts(file):
            pass
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8: {error.reason} at byte {error.start:,}"
        yield DocumentBlock([], (number, 1), done + size, [("", why)])
        return
    read = 0
    for group, following in pairwise(chain(pieces(_text_parts(file), tokenizer), [[]])):
        # In characters, of which there are no more than bytes.
        read += sum(map(len, group))
        at = done + min(read, size) if following else done + size
        yield DocumentBlock(group, (number, 1), at, (), True, bool(following))


def _text_parts(file: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in parts; errors name the byte of the file."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = 0
    with open(file, "rb") as content:
        while True:
            part = content.read(READ_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(part, final=not part)
            except UnicodeDecodeError as error:
                error.start += place - pending
                raise
            place += len(part)
            if text:
                yield text
            if not part:
                return
