"""Attention with any function of its scores, a block of queries and keys at a time, on GPUs.

Scores exist only inside a block: the forward pass keeps a running maximum and sum of each row, from
which the backward pass makes weights of scores that it computes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from meshwright.program.kernels.joined_attention import Attend, AttentionPart, differentiable
from meshwright.program.kernels.masks import Allowed
from meshwright.program.kernels.score_functions import Block, ScoreFunction

_load, _store, _product, _Options = triton.load, triton.store, triton.dot, triton.CompilerParams


class Tile(NamedTuple):
    """How many queries and keys a block has, and how many warps and stages compute it."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiles_for(channels: int) -> tuple[Tile, Tile, Tile]:
    """Return the blocks of the forward pass, of the gradient of queries, and of that of keys."""
    first = Tile(128, 64, 4, 3) if channels <= 64 else Tile(128, 64, 8, 2)
    return first, Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)


def block_attention(
    function: ScoreFunction,
    allowed: Allowed,
    tiles: Sequence[Tile] = (),
    *,
    interpret: bool = False,
) -> Attend:
    """Return attention as a function of query, key, value, and the arrays that scores depend on.

    Args:
        function: what is computed from the products of queries and keys.
        allowed: what queries may attend to; blocks outside of it are skipped.
        tiles: the sizes of blocks, which divide the rows; those for the size of heads by default.
        interpret: whether it runs on any device, to test it.
    """

    def passes(query: Any, key: Any) -> list[Pass]:
        form = (function, allowed, query.shape, key.shape, interpret)
        chosen = tiles or tiles_for(query.shape[-1])
        return [Pass(tile, n == 2, *form) for n, tile in enumerate(chosen)]

    def forward(query: Any, key: Any, value: Any, leaves: Any) -> Any:
        out, *rows = attended(passes(query, key)[0], [query, key, value], leaves)
        return out, jnp.stack(rows)

    def backward(*saved: Any) -> Any:
        query, key, value, leaves, out, rows, cotangent = saved
        means = jnp.einsum("bthc,bthc->bht", out, cotangent, preferred_element_type=rows.dtype)
        read = [query, key, value, cotangent, *rows, means]
        return [x for make in passes(query, key)[1:] for x in gradients(make, read, leaves)]

    return differentiable(AttentionPart(forward, backward))


@dataclass(frozen=True)
class Pass:
    """One of the three kernels, for arrays of some shapes.

    Attributes:
        tile: its blocks.
        by_key: whether each program has a block of keys and loops over queries, or inversely.
        function: what is computed from scores.
        allowed: what queries may attend to.
        query: the shape of the queries, [B, T, H, C].
        key: the shape of the keys, [B, S, K, C].
        interpret: whether it runs on any device.
    """

    tile: Tile
    by_key: bool
    function: ScoreFunction
    allowed: Allowed
    query: tuple[int, ...]
    key: tuple[int, ...]
    interpret: bool

    def run(self, kernel: Any, read: Sequence[Any], leaves: Sequence[Any], results: Any) -> Any:
        """Run a kernel over all blocks, heads and samples."""
        length = self.key[1] if self.by_key else self.query[1]
        leaves = [leaf.astype(jnp.int8) if leaf.dtype == bool else leaf for leaf in leaves]
        return pl.pallas_call(
            kernel,
            grid=(length // self.tile[int(self.by_key)], self.query[2], self.query[0]),
            in_specs=[*(self._spec(x.shape) for x in read), *(_leaf_spec(x.shape) for x in leaves)],
            out_specs=[self._spec(result.shape) for result in results],
            out_shape=results,
            compiler_params=_Options(num_warps=self.tile.warps, num_stages=self.tile.stages),
            interpret=self.interpret,
            name=kernel.__name__,
        )(*read, *leaves)

    def _spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Return what a program sees of an array [B, T, H, C], or of numbers [B, H, T]."""
        if len(shape) == 3:
            return pl.BlockSpec((None, None, shape[2]), lambda n, h, b: (b, h, 0))
        group = self.query[2] // shape[2]
        at = lambda n, h, b: (b, 0, lax.div(h, group), 0)  # noqa: E731
        return pl.BlockSpec((None, shape[1], None, shape[3]), at)

    def own(self) -> Any:
        """Return the queries of a program; by key, its keys."""
        number, size = pl.program_id(0), self.tile[int(self.by_key)]
        # Those with the most keys first.
        return pl.ds((number if self.by_key else pl.num_programs(0) - 1 - number) * size, size)

    def function_of(self, refs: Sequence[Any], own: Any, other: Any, *, edge: bool) -> Any:
        """Return the function of a block's products, which are [keys, queries] by key.

        At the ``edge``, some pairs of a query and a key are not allowed.
        """
        turn = (lambda x: x.T) if self.by_key else (lambda x: x)
        rows, keys = (other, own) if self.by_key else (own, other)
        leaves = [turn(_leaf(ref, rows, keys)) for ref in refs]
        at = [x.start + lax.iota(jnp.int32, x.size) for x in (rows, keys)]
        at = turn(at[0][:, None]), turn(at[1][None, :])
        return lambda products: self.function(Block(products, leaves, at, edge))

    def loop(self, own: Any, body: Callable[..., Any], carry: Any) -> Any:
        """Loop over the blocks of keys that a program's queries attend to, or inversely.

        The body is told whether a block is at the edge, and its positions.
        """
        size, length = self.tile[1 - int(self.by_key)], (self.query if self.by_key else self.key)[1]
        low, high = own.start, own.start + own.size - 1
        # How far keys are from queries at least and at most; None for any distance.
        least = None if self.allowed.window is None else 1 - self.allowed.window
        most = 0 if self.allowed.causal else None
        if self.by_key:
            least, most = most, None if least is None else -least
        begin = inner = 0
        outer = end = length // size
        if least is not None:
            begin = lax.div(jnp.maximum(low + least, 0), size)
            inner = lax.div(jnp.maximum(high + least, 0) + size - 1, size)
        if most is not None:
            outer = lax.div(low + most + 1, size)
            end = jnp.minimum(end, lax.div(high + most, size) + 1)
        inner = inner if inner is begin else jnp.clip(inner, begin, end)
        outer = outer if outer is end else jnp.clip(outer, inner, end)
        # Where no block is skipped, all of them may hide keys.
        inside = least is None and most is None
        for edge, first, last in ((True, begin, inner), (inside, inner, outer), (True, outer, end)):
            if first is not last:
                visit = lambda n, c, edge=edge: body(edge, pl.ds(n * size, size), c)  # noqa: E731
                carry = lax.fori_loop(first, last, visit, carry)
        return carry


def attended(make: Pass, read: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Return the mixed values; for each query its maximum, and the logarithm of its sum."""
    query = read[0]
    wide = jnp.promote_types(query.dtype, jnp.float32)

    def attention(q: Any, k: Any, v: Any, *refs: Any) -> None:
        *read, out, peaks, totals = refs
        rows = make.own()
        queries = _load(q.at[rows, :])

        def body(edge: bool, keys: Any, carry: Any) -> Any:
            mixed, peak, total = carry
            products = _dot(queries, _load(k.at[keys, :]).T, wide)
            scores = make.function_of(read, rows, keys, edge=edge)(products)
            values = _load(v.at[keys, :])
            if not make.function.normalized:
                return mixed + _dot(scores.astype(values.dtype), values, wide), peak, total
            higher = jnp.maximum(peak, scores.max(1))
            weights, shrunk = jnp.exp(scores - higher[:, None]), jnp.exp(peak - higher)
            mixed = mixed * shrunk[:, None] + _dot(weights.astype(values.dtype), values, wide)
            return mixed, higher, total * shrunk + weights.sum(1)

        # A block may hide all of its keys from a query.
        lowest = jnp.full((rows.size,), jnp.finfo(wide).min, wide)
        start = jnp.zeros((rows.size, query.shape[3]), wide), lowest, jnp.zeros_like(lowest)
        mixed, peak, total = make.loop(rows, body, start)
        mixed = mixed / total[:, None] if make.function.normalized else mixed
        _store(out.at[rows, :], mixed.astype(out.dtype))
        _store(peaks.at[rows], peak)
        _store(totals.at[rows], jnp.log(total))

    numbers = jax.ShapeDtypeStruct((query.shape[0], query.shape[2], query.shape[1]), wide)
    out = jax.ShapeDtypeStruct(query.shape, query.dtype)
    return make.run(attention, read, leaves, [out, numbers, numbers])


def gradients(make: Pass, read: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Return the gradient of the queries; by key, those of the keys and the values."""
    wide, count = read[-1].dtype, 2 if make.by_key else 1

    def gradient(*refs: Any) -> None:
        q, k, v, given, *numbers = refs[:7]
        pairs = ((k, v), (q, given)) if make.by_key else ((q, given), (k, v))
        own = make.own()
        ours = [_load(ref.at[own, :]) for ref in pairs[0]]
        of_own = [] if make.by_key else [_load(x.at[own])[:, None] for x in numbers]

        def body(edge: bool, other: Any, carry: Any) -> Any:
            theirs = [_load(ref.at[other, :]) for ref in pairs[1]]
            row = [_load(x.at[other])[None, :] for x in numbers] if make.by_key else of_own
            products, change = (_dot(a, b.T, wide) for a, b in zip(ours, theirs, strict=True))
            run = make.function_of(refs[7:-count], own, other, edge=edge)
            scores, pull = jax.vjp(run, products)
            if make.function.normalized:
                peak, total, mean = row
                # The maximum first: where all keys are hidden, it is too large for sums to count.
                scores = jnp.exp(scores - peak - total)
                change = scores * (change - mean)
            factors = zip(carry, (pull(change)[0], scores), theirs, strict=False)
            return tuple(s + _dot(x.astype(y.dtype), y, wide) for s, x, y in factors)

        start = tuple(jnp.zeros(x.shape, wide) for x in ours[:count])
        for ref, total in zip(refs[-count:], make.loop(own, body, start), strict=True):
            _store(ref.at[own, :], total.astype(ref.dtype))

    like = read[int(make.by_key)]
    (samples, length, heads, channels), group = like.shape, make.query[2] // like.shape[2]
    # Each head of queries has its own gradients of keys; they are added afterwards.
    shape, dtype = (samples, length, make.query[2], channels), like.dtype if group == 1 else wide
    found = make.run(gradient, read, leaves, [jax.ShapeDtypeStruct(shape, dtype)] * count)
    return [x.reshape(samples, length, heads, group, channels).sum(3) for x in found]


def _leaf_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Return what a program sees of an array that the function reads."""
    of_sample, of_head = (int(size > 1) for size in shape[:2])
    at = lambda n, h, b: (b * of_sample, h * of_head, 0, 0)  # noqa: E731
    return pl.BlockSpec((None, None, *shape[2:]), at)


def _leaf(ref: Any, rows: Any, keys: Any) -> Any:
    """Load what a block needs of an array that the function reads: [queries or 1, keys or 1]."""
    spans = zip(ref.shape, (rows, keys), strict=True)
    index = tuple(span if size > 1 else jnp.zeros((), jnp.int32) for size, span in spans)
    return jnp.expand_dims(_load(ref.at[index]), [n for n in (0, 1) if ref.shape[n] == 1])


def _dot(left: Any, right: Any, wide: Any) -> Any:
    return _product(left, right).astype(wide)
