"""Causal attention of positions that are sharded over the context axis, without their scores.

Queries attend to chunks of keys one after the other, and the results are joined. Without a window,
keys are gathered, and devices exchange half of their queries, the first with the last, the second
with the one before it: each then has as many chunks of keys before its queries as the others. With
a window, devices fetch the keys inside of it from those before them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.mesh.axes import CONTEXT
from meshwright.program.kernels.masks import Allowed, band

_OVERHEAD = 128
"""How many keys could be read in the time that another chunk of them costs."""
Attend = Callable[..., Any]
"""(query [B, T, H, C], key and value [B, S, K, C], mask [B, 1, T, S] or None) → [B, T, H, C].

A mask says all that queries may attend to. Attention with a function of its scores gets, instead,
what the function reads, each [B or 1, H or 1, T or 1, S or 1]; its parts also get the positions.
"""

ATTENDED = "attended"
"""The name of what attention saves for its gradient besides its operands."""
NEVER = -1e30
"""The score of a hidden key: its weight is zero, unless all keys of a part are hidden."""


class AttentionPart(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        forward: from query, key, value and mask to the result and the logarithm [B, H, T] of the
            sum of exponentials that it is divided by.
        gradients: from the same operands, the result and the logarithm for all keys, and the
            gradient of that result, to the gradients of query, key and value, and, if what a
            function of scores reads is learned, of that.
    """

    forward: Callable[..., tuple[Any, Any]]
    gradients: Callable[..., tuple[Any, ...]]


def differentiable(part: AttentionPart) -> Attend:
    """Return attention whose gradient is that of a part, which has all keys."""
    attend = jax.custom_vjp(lambda *operands: part.forward(*operands)[0])

    def forward(*operands: Any) -> Any:
        out, total = (checkpoint_name(result, ATTENDED) for result in part.forward(*operands))
        return out, (*operands, out, total)

    def backward(saved: Any, cotangent: Any) -> Any:
        found = part.gradients(*saved, cotangent)
        own = (g.astype(x.dtype) for g, x in zip(found[:3], saved, strict=False))
        return (*own, found[3] if len(found) > 3 else None)

    attend.defvjp(forward, backward)
    return attend


PartOf = Callable[[Allowed], AttentionPart]


class _Read(NamedTuple):
    """Chunks of queries from one on, and as many of keys, of which some may not exist."""

    part: AttentionPart
    query: Any
    key: Any
    number: int = 1
    mask: Any = None
    exists: Any = True

    def take(self, first: Any, *arrays: Any) -> list[Any]:
        """Return chunks of arrays, as samples."""
        taken = [lax.dynamic_slice_in_dim(x, first, self.number, axis=1) for x in arrays]
        return [x.reshape(-1, *x.shape[2:]) for x in taken]

    def where_exists(self, total: Any, other: float) -> Any:
        """Return a number for each query, or another one where its keys do not exist."""
        by_chunk = total.reshape(-1, self.number, *total.shape[1:])
        return jnp.where(self.exists, by_chunk, other).reshape(total.shape)


@dataclass(frozen=True)
class SharedRows:
    """How devices share rows of positions.

    Attributes:
        size: the number of devices of a row.
        own: the positions of a device, divisible by 4.
        window: how many keys a query attends to; None for all before it.
    """

    size: int
    own: int
    window: int | None

    @cached_property
    def chunk(self) -> int:
        """The positions of a chunk."""
        if self.window is None:
            return self.own // 2
        sizes = [n for n in range(2, self.own + 1, 2) if self.own % n == 0]
        return min(sizes, key=lambda n: (self._halo(n) + n) * (1 + _OVERHEAD / n))

    def _halo(self, chunk: int) -> int:
        return -(-((self.window or 1) - 1) // chunk) * chunk

    @property
    def halo(self) -> int:
        """How many keys before its own a device fetches, if there is a window."""
        return self._halo(self.chunk)

    def attention(self, part_of: PartOf, group: int) -> Attend:
        """Return attention for a device's own queries and keys, whose heads repeat in groups."""
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

    def _seen(self, read: _Read, samples: int, leaves: Any) -> Any:
        """Return what the scores of chunks depend on: leaves and positions, or only a mask."""
        if leaves is None:
            return read.mask
        index, count = lax.axis_index(CONTEXT), self.own // self.chunk
        rows, keys = index * count + jnp.arange(count), jnp.arange(self.size * count)
        if self.window is None:
            rows = jnp.stack([2 * index, 2 * (self.size - index) - 1])
        else:
            before = self.halo // self.chunk
            keys = rows[0] - before + jnp.arange(before + count)
        firsts = ((rows, read.query), (keys, read.key))
        at = [lax.dynamic_slice_in_dim(x, first, read.number) for x, first in firsts]

        places = [x[:, None] * self.chunk + jnp.arange(self.chunk) for x in at]
        query_at, key_at = (jnp.tile(x, (samples, 1)) for x in places)
        seen = [self._of_chunks(leaf, at, samples) for leaf in leaves]
        return seen, (query_at[:, None, :, None], key_at[:, None, None, :])

    def _of_chunks(self, leaf: Any, at: Sequence[Any], samples: int) -> Any:
        """Return what chunks of queries, or else of keys, read of [B or 1, H, T or 1, S or 1]."""
        dim = 2 if leaf.shape[2] > 1 else 3
        leaf = jnp.moveaxis(leaf, dim, 1)
        if leaf.shape[1] > 1:
            leaf = leaf.reshape(leaf.shape[0], -1, self.chunk, *leaf.shape[2:])
        else:
            leaf = leaf[:, None]
        # Chunks that do not exist are not counted, whatever they read.
        leaf = jnp.take(leaf, at[dim - 2], axis=1, mode="clip")
        leaf = jnp.broadcast_to(leaf, (samples, *leaf.shape[1:]))
        return jnp.moveaxis(leaf.reshape(-1, *leaf.shape[2:]), 1, dim)

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

        def forward(query: Any, key: Any, value: Any, leaves: Any) -> Any:
            shape = (*query.shape[:3], value.shape[3])
            query, key, value = (self._chunks(x) for x in (query, key, value))
            wide = jnp.promote_types(query.dtype, jnp.float32)

            def visit(state: Any, read: _Read) -> Any:
                own, out, before = read.take(read.query, query, *state)
                keys = read.take(read.key, key, value)
                found, total = read.part.forward(own, *keys, self._seen(read, len(query), leaves))
                total = read.where_exists(total, NEVER)
                after = jnp.logaddexp(before, total)
                shares = [jnp.exp(x - after).swapaxes(1, 2)[..., None] for x in (before, total)]
                out = out * shares[0] + found * shares[1]
                return [_put(read.query, *both) for both in zip(state, (out, after), strict=True)]

            out = jnp.zeros((*query.shape[:-1], value.shape[-1]), wide)
            total = jnp.full((*query.shape[:2], query.shape[3], self.chunk), NEVER, wide)
            out, total = self._visit(part_of, visit, [out, total])
            return out.astype(query.dtype).reshape(shape), total

        def gradients(*saved: Any) -> Any:
            query, key, value, out, cotangent = (self._chunks(saved[n]) for n in (0, 1, 2, 4, 6))
            leaves, total = saved[3], saved[5]

            def visit(state: Any, read: _Read) -> Any:
                own, *known = read.take(read.query, query, out, total, cotangent)
                known[1] = read.where_exists(known[1], -NEVER)
                keys = read.take(read.key, key, value)
                seen = self._seen(read, len(query), leaves)
                found = read.part.gradients(own, *keys, seen, *known)
                places = read.query, read.key, read.key
                each = zip(places, state, found, strict=True)
                return [_put(n, x, read.take(n, x)[0] + more) for n, x, more in each]

            sums = [jnp.zeros(x.shape, total.dtype) for x in (query, key, value)]
            sums = self._visit(part_of, visit, sums)
            return tuple(x.reshape(y.shape) for x, y in zip(sums, saved, strict=False))

        return AttentionPart(forward, gradients)

    def _chunks(self, array: Any) -> Any:
        return array.reshape(array.shape[0], -1, self.chunk, *array.shape[2:])


def _put(first: Any, array: Any, chunks: Any) -> Any:
    """Return an array with other chunks from a first one on."""
    chunks = chunks.reshape(array.shape[0], -1, *array.shape[2:]).astype(array.dtype)
    return lax.dynamic_update_slice_in_dim(array, chunks, first, axis=1)
