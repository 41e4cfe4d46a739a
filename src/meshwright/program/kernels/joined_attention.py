"""Causal attention of positions that are sharded over the context axis, without their scores.

Queries attend to chunks of keys one after the other, and the results are joined. Without a window,
keys are gathered, and devices exchange half of their queries, the first with the last, the second
with the one before it: each then has as many chunks of keys before its queries as the others. With
a window, devices fetch the keys inside of it from those before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from meshwright.mesh.axes import CONTEXT
from meshwright.program.kernels.attention_parts import (
    NEVER,
    Attend,
    AttentionPart,
    band,
    differentiable,
)
from meshwright.program.kernels.masks import Allowed

PartOf = Callable[[Allowed], AttentionPart]
_OVERHEAD = 128
"""How many keys could be read in the time that another chunk of them costs."""


@dataclass(frozen=True)
class SharedRows:
    """How devices share rows of positions.

    Attributes:
        size: the number of devices of a row.
        length: the positions of a row.
        window: how many keys a query attends to; None for all before it.
    """

    size: int
    length: int
    window: int | None

    @property
    def own(self) -> int:
        """The positions of a device."""
        return self.length // self.size

    @property
    def chunk(self) -> int:
        """The positions of a chunk."""
        if self.window is None:
            return self.own // 2
        sizes = [n for n in range(2, self.own + 1, 2) if self.own % n == 0]
        return min(sizes, key=lambda n: (self._chunks_before(n) + 1) * (n + _OVERHEAD))

    def _chunks_before(self, chunk: int) -> int:
        return math.ceil(((self.window or 1) - 1) / chunk)

    @property
    def halo(self) -> int:
        """How many keys before its own a device fetches, if there is a window."""
        return self._chunks_before(self.chunk) * self.chunk

    @property
    def is_possible(self) -> bool:
        """Whether rows can be divided like this, into chunks of an even length."""
        return self.length % (4 * self.size) == 0 and self.halo < self.length - self.own

    def attention(self, part_of: PartOf, *, is_gathered: bool) -> Attend:
        """Return attention for a device's own queries.

        Args:
            part_of: attention to keys at some distance.
            is_gathered: whether each device has all keys already, not only its own.
        """
        attend = differentiable(_joined(self.chunk, lambda: self._reads(part_of)))

        def run(query: Any, key: Any, value: Any, mask: Any) -> Any:
            if self.window is not None:
                fetch = self._kept if is_gathered else self._fetched
                return attend(query, fetch(key), fetch(value), mask)
            if not is_gathered:
                key, value = (lax.all_gather(x, CONTEXT, axis=1, tiled=True) for x in (key, value))
            return self._mirrored(attend(self._mirrored(query), key, value, mask))

        return run

    def _mirrored(self, rows: Any) -> Any:
        """Exchange the second half of a device's rows with the device at the other end."""
        kept, given = jnp.split(rows, 2, axis=1)
        pairs = [(n, self.size - 1 - n) for n in range(self.size)]
        return jnp.concatenate([kept, lax.ppermute(given, CONTEXT, pairs)], axis=1)

    def _fetched(self, keys: Any) -> Any:
        """Return a device's keys after those that it fetches from the devices before it."""
        parts, left = [keys], self.halo
        for away in range(1, math.ceil(self.halo / self.own) + 1):
            pairs = [(n, n + away) for n in range(self.size - away)]
            given = keys[:, max(0, self.own - left) :]
            parts.insert(0, lax.ppermute(given, CONTEXT, pairs))
            left -= self.own
        return jnp.concatenate(parts, axis=1)

    def _kept(self, keys: Any) -> Any:
        """Return a device's keys after those before them, of all keys."""
        padded = jnp.pad(keys, ((0, 0), (self.halo, 0), (0, 0), (0, 0)))
        first = lax.axis_index(CONTEXT) * self.own
        return lax.dynamic_slice_in_dim(padded, first, self.halo + self.own, axis=1)

    def _reads(self, part_of: PartOf) -> _Reads:
        own, other = part_of(Allowed(0, self.window)), part_of(Allowed())
        index, chunk = lax.axis_index(CONTEXT), self.chunk
        if self.window is None:
            first, second = 2 * index, 2 * (self.size - index) - 1

            def earlier(step: Any) -> _Read:
                is_second = (step >= first).astype(jnp.int32)
                return _Read(other, is_second, step - is_second * first)

            own_chunks = [_Read(own, 0, first), _Read(own, 1, second)]
            return _Reads(own_chunks, 2 * self.size - 1, earlier)
        count, before = self.own // chunk, self.halo // chunk
        number = index * count + jnp.arange(count)[:, None, None]
        reads = [_Read(own, 0, before, count)]
        for away in range(1, before + 1):
            is_whole = (away + 1) * chunk <= self.window
            near = band(Allowed(window=self.window), (chunk, chunk), away * chunk)[None, None]
            mask = None if is_whole else near
            reads.append(_Read(other, 0, before - away, count, mask, number >= away))
        return _Reads(reads)


class _Read(NamedTuple):
    """Some chunks of queries, which attend to as many chunks of keys, each to its own.

    Attributes:
        part: how they attend.
        query: the first chunk of queries.
        key: the first chunk of keys.
        count: how many.
        mask: which keys of a chunk they see.
        exists: whether keys are positions of the row.
    """

    part: AttentionPart
    query: Any
    key: Any
    count: int = 1
    mask: Any = None
    exists: Any = True


class _Reads(NamedTuple):
    """What is read: first a few, then others in a loop."""

    first: Sequence[_Read]
    steps: int = 0
    then: Callable[[Any], _Read] | None = None

    def fold(self, visit: Callable[[Any, _Read], Any], state: Any) -> Any:
        """Visit all reads, one after the other."""
        for read in self.first:
            state = visit(state, read)
        if self.then is None:
            return state
        then = self.then
        return lax.fori_loop(0, self.steps, lambda step, state: visit(state, then(step)), state)


def _joined(chunk: int, reads: Callable[[], _Reads]) -> AttentionPart:
    """Return attention to all that is read, chunk by chunk."""

    def chunks(*arrays: Any) -> list[Any]:
        return [x.reshape(x.shape[0], -1, chunk, *x.shape[2:]) for x in arrays]

    def take(array: Any, first: Any, read: _Read) -> Any:
        taken = lax.dynamic_slice_in_dim(array, first, read.count, axis=1)
        return taken.reshape(-1, *taken.shape[2:])

    def put(array: Any, part: Any, first: Any, read: _Read) -> Any:
        part = part.reshape(array.shape[0], read.count, *array.shape[2:]).astype(array.dtype)
        return lax.dynamic_update_slice_in_dim(array, part, first, axis=1)

    def operands(query: Any, key: Any, value: Any, read: _Read) -> Any:
        first = read.query, read.key, read.key
        arrays = [take(x, n, read) for x, n in zip((query, key, value), first, strict=True)]
        return (*arrays, read.mask)

    def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
        shape = (*query.shape[:3], value.shape[3])
        query, key, value = chunks(query, key, value)
        wide = jnp.promote_types(query.dtype, jnp.float32)

        def visit(state: Any, read: _Read) -> Any:
            found, total = read.part.forward(*operands(query, key, value, read))
            total = _where_exists(read, total, NEVER)
            out, before = (take(x, read.query, read) for x in state)
            after = jnp.logaddexp(before, total)
            shares = (jnp.exp(x - after).swapaxes(1, 2)[..., None] for x in (before, total))
            joined = sum(x * share for x, share in zip((out, found), shares, strict=True))
            return [
                put(x, y, read.query, read) for x, y in zip(state, (joined, after), strict=True)
            ]

        out = jnp.zeros((*query.shape[:-1], value.shape[-1]), wide)
        total = jnp.full((*query.shape[:2], query.shape[3], chunk), NEVER, wide)
        out, total = reads().fold(visit, [out, total])
        return out.astype(query.dtype).reshape(shape), total

    def gradients(*saved: Any) -> Any:
        query, key, value, _, out, total, cotangent = saved
        query, key, value, out, cotangent = chunks(query, key, value, out, cotangent)

        def visit(state: Any, read: _Read) -> Any:
            known = [take(x, read.query, read) for x in (out, total, cotangent)]
            known[1] = _where_exists(read, known[1], -NEVER)
            found = read.part.gradients(*operands(query, key, value, read), *known)
            first = read.query, read.key, read.key
            both = zip(state, found, first, strict=True)
            return [put(x, take(x, n, read) + y, n, read) for x, y, n in both]

        sums = [jnp.zeros(x.shape, total.dtype) for x in (query, key, value)]
        sums = reads().fold(visit, sums)
        return tuple(x.reshape(y.shape) for x, y in zip(sums, saved, strict=False))

    return AttentionPart(forward, gradients)


def _where_exists(read: _Read, total: Any, other: float) -> Any:
    """Return a logarithm [B, H, T] for each chunk, or another value where its keys do not exist."""
    by_chunk = total.reshape(-1, read.count, *total.shape[1:])
    return jnp.where(read.exists, by_chunk, other).reshape(total.shape)
