"""Attention with any function of its scores, some queries at a time, on any device.

Scores are computed again for the gradient, from the largest one of each query and the sum of its
exponentials.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.program.kernels.joined_attention import Attend, AttentionPart, differentiable
from meshwright.program.kernels.masks import Allowed
from meshwright.program.kernels.score_functions import Block, ScoreFunction

ROWS, PARTS = 512, 8
"""How many queries attend at once, at least, to the keys that one of them may see; and how many
parts of a row there are at most, each of which is compiled."""


def rows_attention(function: ScoreFunction, allowed: Allowed) -> Attend:
    """Return attention with a function of its scores."""

    def forward(query: Any, key: Any, value: Any, leaves: Any) -> Any:
        query, key, value = (_by_head(x, key.shape[2]) for x in (query, key, value))
        found: list[Any] = []
        for part in _parts(function, allowed, query, key):
            products = _product(part.queries(query), part.keys(key), 3, 3)
            weights, sums = part.scores(products, leaves), list[Any]()
            if function.normalized:
                peak = weights.max(-1, keepdims=True)
                exponentials = jnp.exp(weights - peak)
                sums = [peak, exponentials.sum(-1, keepdims=True)]
                weights = exponentials / sums[1]
            out = _product(weights.astype(value.dtype), part.keys(value), 3, 2)
            found.append([part.of_queries(x, query) for x in (out, *sums)])
        out, *sums = (jnp.concatenate(parts, 3) for parts in zip(*found, strict=True))
        return _by_position(out), sums

    def gradients(*saved: Any) -> Any:
        # Without a barrier, the compiler would keep the scores of the forward pass.
        query, key, value, leaves, out, sums, given = lax.optimization_barrier(saved)
        wide, heads = jnp.promote_types(query.dtype, jnp.float32), key.shape[2]
        means = (out.astype(wide) * given.astype(wide)).sum(-1, keepdims=True)
        by_head = (_by_head(x, heads) for x in (query, key, value, given, means))
        query, key, value, given, means = by_head
        reals = [n for n, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        learned = reals if function.learned else []
        found: list[Any] = []
        for part in _parts(function, allowed, query, key):
            own, of_out = part.queries(query), part.queries(given)
            products = _product(own, part.keys(key), 3, 3)
            weights, pull = part.differentiate(products, leaves, learned)
            of_scores = _product(of_out, part.keys(value), 3, 3).astype(wide)
            if function.normalized:
                peak, total = (part.queries(x) for x in sums)
                weights = jnp.exp(weights - peak) / total
                of_scores = weights * (of_scores - part.queries(means))
            of_products, *of_leaves = pull(of_scores)
            of_query = _product(of_products, part.keys(key), 3, 2)
            of_key = _product(of_products, own, 2, 2)
            of_value = _product(weights.astype(value.dtype), of_out, 2, 2)
            of_keys = [part.of_keys(x, key) for x in (of_key, of_value)]
            found.append([part.of_queries(of_query, query), *of_keys, *of_leaves])
        of_query, *others = zip(*found, strict=True)
        of_key, of_value, *of_leaves = (sum(parts[1:], parts[0]) for parts in others)
        by_head = jnp.concatenate(of_query, 3), of_key, of_value
        of_leaf = dict(zip(learned, of_leaves, strict=True))
        return *map(_by_position, by_head), [of_leaf.get(n) for n in range(len(leaves))]

    return differentiable(AttentionPart(forward, gradients))


@dataclass(frozen=True)
class _Part:
    """Some queries and the keys that one of them may see.

    Attributes:
        function: what is computed from their products.
        rows: which queries.
        seen: which keys.
        size: how many queries and keys there are.
    """

    function: ScoreFunction
    rows: slice
    seen: slice
    size: tuple[int, int]

    def queries(self, array: Any) -> Any:
        """Return what belongs to its queries, [B, K, G·R, C] of [B, K, G, T, C]."""
        own = array[:, :, :, self.rows]
        return own.reshape(*own.shape[:2], -1, own.shape[-1])

    def of_queries(self, array: Any, like: Any) -> Any:
        """Return what was computed for its queries as [B, K, G, R, C]."""
        return array.reshape(*like.shape[:3], -1, array.shape[-1])

    def keys(self, array: Any) -> Any:
        """Return what belongs to its keys, [B, K, S', C] of [B, K, 1, S, C]."""
        return array[:, :, 0, self.seen]

    def of_keys(self, array: Any, like: Any) -> Any:
        """Return what was computed for its keys as [B, K, 1, S, C], zero for all others."""
        around = self.seen.start, like.shape[3] - self.seen.stop
        return jnp.pad(array[:, :, None], [(0, 0)] * 3 + [around, (0, 0)])

    def scores(self, products: Any, leaves: Sequence[Any]) -> Any:
        """Return the function of products [B, K, G·R, S']."""
        for dim, part in ((2, self.rows), (3, self.seen)):
            at = (*[slice(None)] * dim, part)
            leaves = [x[at] if x.shape[dim] > 1 else x for x in leaves]
        at = jnp.arange(self.size[0])[self.rows, None], jnp.arange(self.size[1])[None, self.seen]
        wide = products.astype(jnp.promote_types(products.dtype, jnp.float32))
        wide = wide.reshape(len(wide), -1, self.rows.stop - self.rows.start, wide.shape[-1])
        return self.function(Block(wide, leaves, at)).reshape(products.shape)

    def differentiate(self, products: Any, leaves: Any, learned: Sequence[int]) -> Any:
        """Return the scores, and what pulls gradients back to products and learned leaves."""

        def scored(products: Any, *reals: Any) -> Any:
            read = dict(enumerate(leaves)) | dict(zip(learned, reals, strict=True))
            return self.scores(products, list(read.values()))

        return jax.vjp(scored, products, *(leaves[n] for n in learned))


def _parts(function: ScoreFunction, allowed: Allowed, query: Any, key: Any) -> Iterator[_Part]:
    length, keys = query.shape[3], key.shape[3]
    rows = max(ROWS, -(-length // PARTS))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        before = 0 if allowed.window is None else max(first - allowed.window + 1, 0)
        seen = slice(min(before, keys - 1), min(last, keys) if allowed.causal else keys)
        yield _Part(function, slice(first, last), seen, (length, keys))


def _product(left: Any, right: Any, left_dim: int, right_dim: int) -> Any:
    """Return the products over one dim of each; samples and heads come first."""
    return lax.dot_general(left, right, (((left_dim,), (right_dim,)), ((0, 1), (0, 1))))


def _by_head(array: Any, heads: int) -> Any:
    """Return [B, K, G, T, C] of [B, T, K·G, C]."""
    batch, length, _, channels = array.shape
    return array.reshape(batch, length, heads, -1, channels).transpose(0, 2, 3, 1, 4)


def _by_position(array: Any) -> Any:
    """Return [B, T, K·G, C] of [B, K, G, T, C]."""
    array = array.transpose(0, 3, 1, 2, 4)
    return array.reshape(*array.shape[:2], -1, array.shape[-1])
