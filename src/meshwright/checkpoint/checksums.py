"""Checksums of arrays that do not depend on the mesh: each shard adds its part to a sum.

The checksum of an array is the sum, modulo 2**64, of its 64-bit words, each multiplied by an odd
number that depends on where the word is in the array. An odd factor makes every change of a single
word visible, and different factors make other changes visible except by chance. Parts of an array
can be added up in any order, so shards of any mesh give the same sum.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8
_COLUMNS = 2**12
"""Words of a row that are summed at a time, with the same factors up to a common one."""


@dataclass(frozen=True)
class ArraySum:
    """The checksum of an array, or of the elements of it that one process has."""

    shape: tuple[int, ...]
    dtype: str
    elements: int
    total: int

    @property
    def complete(self) -> bool:
        """Whether every element of the array is part of the sum."""
        return self.elements == math.prod(self.shape)

    def __add__(self, other: ArraySum) -> ArraySum:
        total = (self.total + other.total) % 2**64
        return ArraySum(self.shape, self.dtype, self.elements + other.elements, total)

    def to_json(self) -> dict[str, Any]:
        """Return the checksum as JSON can hold it."""
        return {**vars(self), "shape": list(self.shape), "total": f"{self.total:016x}"}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ArraySum:
        """Return the checksum that `to_json` described."""
        return cls(
            tuple(values["shape"]), values["dtype"], values["elements"], int(values["total"], 16)
        )


ArraySums = dict[str, ArraySum]
"""Checksums by group and path, such as ``params/blocks.0.mlp.up.kernel``."""


def sums_of(groups: Mapping[str, Mapping[str, Any]], *, main: bool = True) -> ArraySums:
    """Return the checksums of what this process holds of the arrays, by group and path.

    Every part of a JAX array is counted by one process; NumPy arrays are counted by the main one.
    """
    return {
        f"{group}/{path}": _sum_of(array, main=main)
        for group, by_path in groups.items()
        for path, array in by_path.items()
    }


def merge_sums(parts: Sequence[ArraySums]) -> ArraySums:
    """Add up the checksums of several processes."""
    merged: ArraySums = {}
    for part in parts:
        for name, own in part.items():
            merged[name] = merged[name] + own if name in merged else own
    return merged


def json_checksum(value: Any) -> int:
    """Return a checksum of a value that JSON can hold, however it is formatted."""
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return zlib.crc32(text.encode())


def block_sum(block: NDArray[Any], start: Sequence[int]) -> int:
    """Return what a block that starts at this index of an array adds to the array's checksum."""
    if block.size == 0:
        return 0
    # NumPy makes a scalar contiguous by giving it a dim.
    words, first = _as_words(np.ascontiguousarray(block), tuple(start) or (0,))
    sums = _sum_rows(words, first[-1])
    for dim in reversed(range(words.ndim - 1)):
        sums = sums @ _factors(dim + 1, first[dim], words.shape[dim])
    return int(sums)


def _sum_of(array: Any, *, main: bool) -> ArraySum:
    elements = total = 0
    for block, start in _own_blocks(array, main=main):
        elements += block.size
        total += block_sum(block, start)
    return ArraySum(tuple(array.shape), np.dtype(array.dtype).name, elements, total % 2**64)


def _own_blocks(array: Any, *, main: bool) -> Iterator[tuple[NDArray[Any], tuple[int, ...]]]:
    """Yield the blocks of an array that this process counts, and where they start."""
    if isinstance(array, jax.Array):
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                yield np.asarray(shard.data), tuple(s.start or 0 for s in shard.index)
    elif main:
        yield np.asarray(array), (0,) * array.ndim


def _as_words(block: NDArray[Any], start: tuple[int, ...]) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Return a block as 64-bit words, and the index of its first word.

    Elements share a word with their neighbours in the whole array, so a block that starts or ends
    inside a word is filled up with zeros, which add nothing.
    """
    size = block.dtype.itemsize
    if size > WORD_BYTES:
        return block.view(np.uint64), (*start[:-1], start[-1] * (size // WORD_BYTES))
    per_word = WORD_BYTES // size
    before = start[-1] % per_word
    after = -(before + block.shape[-1]) % per_word
    bits = block.view(f"u{size}")
    if before or after:
        bits = np.pad(bits, [(0, 0)] * (block.ndim - 1) + [(before, after)])
    return bits.view(np.uint64), (*start[:-1], start[-1] // per_word)


def _sum_rows(words: NDArray[Any], start: int) -> NDArray[Any]:
    """Return the sums over the last dim, whose first word has the index ``start``."""
    end = start + words.shape[-1]
    first, last = start // _COLUMNS, -(-end // _COLUMNS)
    common = _factors(0, first, last - first)
    sums = np.zeros(words.shape[:-1], np.uint64)
    for number in range(first, last):
        begin = number * _COLUMNS
        low, high = max(start, begin), min(end, begin + _COLUMNS)
        # A third faster than the product of integer matrices.
        pieces = np.einsum(
            "...j,j->...",
            words[..., low - start : high - start],
            _COLUMN_FACTORS[low - begin : high - begin],
        )
        sums += pieces * common[number - first : number - first + 1].reshape(())
    return sums


def _factors(kind: int, start: int, count: int) -> NDArray[np.uint64]:
    """Return the odd factors of ``count`` indices: SplitMix64 of the kind and the index."""
    values = np.arange(start, start + count, dtype=np.uint64) + np.uint64(kind << 48)
    values *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    return (values ^ (values >> np.uint64(31))) | np.uint64(1)


_COLUMN_FACTORS = _factors(2**15, 0, _COLUMNS)
