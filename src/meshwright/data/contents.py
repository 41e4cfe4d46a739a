"""The contents of data in its fingerprint: all of them, or parts at places drawn from the seed."""

import hashlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from meshwright.text.units import human_bytes

WHOLE_BYTES = 2**28
"""Data of at most this size are hashed whole, which takes less than a second."""
SAMPLED_BYTES, BLOCK_BYTES = 2**26, 2**16
"""How much of larger data is hashed, and in pieces of which size."""
WHOLE_ITEMS = 20_000
"""How many items of a list are hashed at most."""


class DataFingerprint(NamedTuple):
    """A fingerprint of data, and what of the data it was made from."""

    text: str
    compared: str


@dataclass
class _Asked:
    seed: int = 0
    hashed: int = 0
    total: int = 0

    def compared(self) -> str:
        if not self.total:
            return "its kind and size, not its contents"
        if self.hashed == self.total:
            return f"all {human_bytes(self.total)}"
        return f"{human_bytes(self.hashed)} of {human_bytes(self.total)}"


_asked: ContextVar[_Asked | None] = ContextVar("fingerprint", default=None)


def data_fingerprint(data: Any, seed: int) -> DataFingerprint:
    """Return the fingerprint of data; the seed says which parts of large data are compared."""
    asked = _Asked(seed)
    token = _asked.set(asked)
    try:
        text = data.fingerprint()
    finally:
        _asked.reset(token)
    return DataFingerprint(f"mw2-{text}", asked.compared())


def array_contents(arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """Return a digest of each array, the same on every machine."""
    asked = _asked.get() or _Asked()
    total = sum(array.nbytes for array in arrays)
    asked.total += total
    digests: list[Any] = []
    for number, array in enumerate(arrays):
        digest, share = hashlib.sha256(), SAMPLED_BYTES * array.nbytes // max(total, 1)
        parts = _parts(array) if total <= WHOLE_BYTES else _places(array, share, asked.seed, number)
        for part in parts:
            digest.update(part.tobytes())
            asked.hashed += part.nbytes
        digests.append(digest.hexdigest()[:16])
    return digests


def list_contents(items: Any) -> list[Any]:
    """Return the digest of a list or tuple; of none else, whose items may be random or slow."""
    asked = _asked.get() or _Asked()
    if type(items) not in (list, tuple):
        return []
    chosen = _drawn(len(items), WHOLE_ITEMS, asked.seed)
    arrays: list[NDArray[Any]] = []
    facts: list[Any] = []
    for number in chosen:
        leaves, tree = jax.tree.flatten(items[number])
        facts.append((str(tree), [_fact(leaf, arrays) for leaf in leaves]))
    text = repr((facts, array_contents(arrays))).encode()
    if not arrays:
        # Texts and numbers are compared as they are written.
        asked.hashed, asked.total = asked.hashed + len(text), asked.total + len(text)
    # Items that were left out are of about the same size.
    asked.total = asked.total * len(items) // max(len(chosen), 1)
    return [hashlib.sha256(text).hexdigest()[:16]]


def _fact(leaf: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return what is known of a leaf; its content joins the arrays if it is one."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf if isinstance(leaf, bool | int | float | complex | str) else type(leaf).__name__
    try:
        array = np.asarray(leaf)
    except Exception:
        # Each library fails in its own way; its arrays are then compared by shape.
        return tuple(leaf.shape), str(leaf.dtype)
    if array.dtype.kind != "O":
        arrays.append(array)
    return array.shape, str(array.dtype)


def _parts(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield an array in parts, so that one that is not contiguous is not copied whole."""
    if array.ndim == 0 or not array.size:
        yield array
        return
    rows = max(2**24 * len(array) // array.nbytes, 1)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _places(array: NDArray[Any], share: int, seed: int, number: int) -> Iterator[NDArray[Any]]:
    """Yield the beginning, the end, and pieces between them at places drawn from the seed."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array
    length = max(BLOCK_BYTES * len(flat) // max(flat.nbytes, 1), 1)
    blocks = -(-len(flat) // length)
    drawn = _drawn(blocks, max(share // BLOCK_BYTES, 1), seed, number)
    for block in sorted({0, *drawn, blocks - 1}):
        yield flat[block * length : (block + 1) * length]


def _drawn(total: int, count: int, *seeds: int) -> list[int]:
    """Return ``count`` different numbers below ``total``, in order."""
    rng = np.random.default_rng([seed & 0xFFFFFFFF for seed in seeds])
    return sorted(rng.choice(total, min(count, total), replace=False).tolist())
