"""Causal attention of positions that are sharded over the context axis, without their scores.

Queries attend to chunks of keys one after the other, and the results are joined. Without a window,
keys are gathered, and devices exchange half of their queries, the first with the last, the second
with the one before it: each then has as many chunks of keys before its queries as the others. With
a window, devices fetch the keys inside of it from those before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from meshwright.mesh.axes import CONTEXT
from meshwright.program.kernels.attention_parts import NEVER, Attend, AttentionPart, differentiable
from meshwright.program.kernels.masks import Allowed, band

PartOf = Callable[[Allowed], AttentionPart]
_OVERHEAD = 128
"""How many keys could be read in the time that another chunk of them costs."""


class _Read(NamedTuple):
    """As many chunks of queries as of keys, from a first one on, each of which attends to its own.

    ``exists`` says which of these keys are positions of the row.
    """

    part: AttentionPart
    query: Any
    key: Any
    count: int = 1
    mask: Any = None
    exists: Any = True


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
        return min(sizes, key=lambda n: (self._before(n) + n) * (1 + _OVERHEAD / n))

    def _before(self, chunk: int) -> int:
        return 0 if self.window is None else -(-(self.window - 1) // chunk) * chunk

    @property
    def halo(self) -> int:
        """How many keys before its own a device fetches, if there is a window."""
        return self._before(self.chunk)

    @property
    def is_possible(self) -> bool:
        """Whether rows can be divided like this, into chunks of an even length."""
        return self.length % (4 * self.size) == 0 and self.halo < self.length - self.own

    def attention(self, part_of: PartOf, group: int) -> Attend:
        """Return attention for a device's own queries and keys.

        Args:
            part_of: attention to keys at some distance.
            group: how often each head of keys is repeated.
        """
        attend = differentiable(self.join(part_of))

        def run(query: Any, key: Any, value: Any, mask: Any) -> Any:
            # Devices may have some of the heads that are the same one.
            step = math.gcd(group, key.shape[2])
            key, value = (self._fetched(x[:, :, ::step]) for x in (key, value))
            if self.window is not None:
                return attend(query, key, value, mask)
            return self._mirrored(attend(self._mirrored(query), key, value, mask))

        return run

    def _mirrored(self, rows: Any) -> Any:
        """Exchange the second half of a device's rows with the device at the other end."""
        kept, given = jnp.split(rows, 2, axis=1)
        pairs = [(n, self.size - 1 - n) for n in range(self.size)]
        return jnp.concatenate([kept, lax.ppermute(given, CONTEXT, pairs)], axis=1)

    def _fetched(self, keys: Any) -> Any:
        """Return the keys of all devices; with a window, those of a device and before it."""
        if self.window is None:
            return lax.all_gather(keys, CONTEXT, axis=1, tiled=True)
        parts = [keys]
        for away in range(1, -(-self.halo // self.own) + 1):
            pairs = [(n, n + away) for n in range(self.size - away)]
            given = keys[:, max(0, away * self.own - self.halo) :]
            parts.insert(0, lax.ppermute(given, CONTEXT, pairs))
        return jnp.concatenate(parts, axis=1)

    def _visit(self, part_of: PartOf, visit: Callable[[Any, _Read], Any], state: Any) -> Any:
        """Visit all that a device's queries attend to, one after the other."""
        own, other = part_of(Allowed(0, self.window)), part_of(Allowed())
        index, chunk = lax.axis_index(CONTEXT), self.chunk
        if self.window is None:
            first, second = 2 * index, 2 * (self.size - index) - 1

            def earlier(step: Any, state: Any) -> Any:
                is_second = (step >= first).astype(jnp.int32)
                return visit(state, _Read(other, is_second, step - is_second * first))

            state = visit(visit(state, _Read(own, 0, first)), _Read(own, 1, second))
            return lax.fori_loop(0, 2 * self.size - 1, earlier, state)
        count, before = self.own // chunk, self.halo // chunk
        state = visit(state, _Read(own, 0, before, count))
        for away in range(1, before + 1):
            near = band(Allowed(window=self.window), (chunk, chunk), away * chunk)[None, None]
            mask = None if (away + 1) * chunk <= self.window else near
            exists = (index * count + jnp.arange(count) >= away)[:, None, None]
            state = visit(state, _Read(other, 0, before - away, count, mask, exists))
        return state

    def join(self, part_of: PartOf) -> AttentionPart:
        """Return attention to all that a device's queries attend to, chunk by chunk."""

        def chunks(*arrays: Any) -> list[Any]:
            return [x.reshape(x.shape[0], -1, self.chunk, *x.shape[2:]) for x in arrays]

        def known(total: Any, read: _Read, other: float) -> Any:
            by_chunk = total.reshape(-1, read.count, *total.shape[1:])
            return jnp.where(read.exists, by_chunk, other).reshape(total.shape)

        def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
            shape = (*query.shape[:3], value.shape[3])
            query, key, value = chunks(query, key, value)
            wide = jnp.promote_types(query.dtype, jnp.float32)

            def visit(state: Any, read: _Read) -> Any:
                out, before = _take(read.query, read, *state)
                keys = _take(read.key, read, key, value)
                found, total = read.part.forward(*_take(read.query, read, query), *keys, read.mask)
                total = known(total, read, NEVER)
                after = jnp.logaddexp(before, total)
                shares = [jnp.exp(x - after).swapaxes(1, 2)[..., None] for x in (before, total)]
                out = out * shares[0] + found * shares[1]
                return [_put(read.query, *both) for both in zip(state, (out, after), strict=True)]

            out = jnp.zeros((*query.shape[:-1], value.shape[-1]), wide)
            total = jnp.full((*query.shape[:2], query.shape[3], self.chunk), NEVER, wide)
            out, total = self._visit(part_of, visit, [out, total])
            return out.astype(query.dtype).reshape(shape), total

        def gradients(*saved: Any) -> Any:
            query, key, value, _, out, total, cotangent = saved
            query, key, value, out, cotangent = chunks(query, key, value, out, cotangent)

            def visit(state: Any, read: _Read) -> Any:
                own, *results = _take(read.query, read, query, out, total, cotangent)
                results[1] = known(results[1], read, -NEVER)
                keys = _take(read.key, read, key, value)
                found = read.part.gradients(own, *keys, read.mask, *results)
                places = read.query, read.key, read.key
                before = [_take(n, read, x)[0] for n, x in zip(places, state, strict=True)]
                added = [x + y for x, y in zip(before, found, strict=True)]
                return [_put(*one) for one in zip(places, state, added, strict=True)]

            sums = [jnp.zeros(x.shape, total.dtype) for x in (query, key, value)]
            sums = self._visit(part_of, visit, sums)
            return tuple(x.reshape(y.shape) for x, y in zip(sums, saved, strict=False))

        return AttentionPart(forward, gradients)


def _take(first: Any, read: _Read, *arrays: Any) -> list[Any]:
    """Return some chunks of arrays, as samples."""
    taken = [lax.dynamic_slice_in_dim(x, first, read.count, axis=1) for x in arrays]
    return [x.reshape(-1, *x.shape[2:]) for x in taken]


def _put(first: Any, array: Any, chunks: Any) -> Any:
    """Return an array with other chunks from a first one on."""
    chunks = chunks.reshape(array.shape[0], -1, *array.shape[2:]).astype(array.dtype)
    return lax.dynamic_update_slice_in_dim(array, chunks, first, axis=1)
