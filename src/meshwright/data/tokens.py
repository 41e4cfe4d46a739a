"""Token arrays in memory-mapped files: .npy files, or .bin files of raw integers."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import list_files, load_array, map_array
from meshwright.data.protocols import Source
from meshwright.data.token_rows import StreamRows, check_tokens
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import Setting, UserError

TokenType = Literal["uint8", "uint16", "uint32", "int32", "int64"]

ENDINGS = (".npy", ".bin")

CHECKED_TOKENS = 2**26
"""Tokens of a file that are checked before training starts; others are checked when read."""


def token_source(
    *,
    path: str | list[str],
    sequence_length: int,
    dtype: TokenType | None = None,
    separator: int | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
) -> Source:
    """Return the tokens of a file, or of all in a folder, as rows.

    Args:
        path: an .npy file of integers, a .bin file of raw integers, a folder or pattern of
            them, or a list of these.
        sequence_length: tokens the model sees per row.
        dtype: type of the integers in .bin files; uint16 by default.
        separator: the end-of-document token; with one, documents do not attend to each other.
        tokenizer: a ``tokenizers`` JSON file, to decode what the model generates.
        vocab_size: size of the model's vocabulary, which must hold every token.
    """
    loaded = None if tokenizer is None else load_tokenizer(tokenizer, vocab_size)
    arrays = [_flat(file, dtype) for file in list_files(path, ENDINGS)]
    name = str(Setting("data.path", path))
    for array in arrays:
        check_tokens(_tokens_to_check(array), vocab_size, name)
    return StreamRows(arrays, sequence_length, name, loaded, vocab_size, separator)


def _tokens_to_check(array: NDArray[Any]) -> NDArray[Any]:
    """Return the whole array, or pieces spread over one that takes long to read."""
    if array.size <= CHECKED_TOKENS:
        return array
    starts = np.linspace(0, array.size - CHECKED_TOKENS // 64, 64, dtype=np.int64)
    return np.concatenate([array[start : start + CHECKED_TOKENS // 64] for start in starts])


def _flat(file: Path, dtype: TokenType | None) -> NDArray[Any]:
    if file.suffix == ".npy":
        array = load_array(file)
        if dtype is not None and array.dtype != dtype:
            raise _wrong_type(
                file, f"its dtype is {array.dtype}, and {Setting('data.dtype', dtype)}"
            )
    else:
        dtype = dtype or "uint16"
        size, width = file.stat().st_size, np.dtype(dtype).itemsize
        if size % width:
            raise _wrong_type(
                file, f"its {size:,} bytes are not a multiple of {width}, the size of {dtype}"
            )
        array = map_array(str(file), dtype, 0, (size // width,))
    if array.dtype.kind not in "iu":
        raise _wrong_type(file, f"its dtype is {array.dtype}")
    if array.ndim != 1:
        raise UserError(
            f"{file} is not a flat array of tokens",
            why=f"its shape is {array.shape}",
            fix="save the tokens of all documents as one flat array: array.reshape(-1)",
        )
    return array


def _wrong_type(file: Path, why: str) -> UserError:
    return UserError(
        f"{file} does not hold tokens of that type",
        why=why,
        fix="tokens are integers; for .bin files write "
        f"{Setting('data.dtype', 'uint16', 'uint32')} or another",
    )
