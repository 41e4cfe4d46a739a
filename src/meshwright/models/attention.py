"""What the language models share: masks, attention, initial sizes and checks."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.models.model_sizes import check_sizes

INIT_STD = 0.02
"""Initial standard deviation of embeddings and kernels."""


def residual_std(num_blocks: int) -> float:
    """Initial standard deviation of layers that write to the residual stream, two per block."""
    check_sizes(num_blocks=num_blocks)
    return INIT_STD / math.sqrt(2 * num_blocks)


def causal_mask(
    length: int, segment_ids: Array | None = None, *, window: int | None = None
) -> Array:
    """Return which keys each query may attend to: bool [1 or B, T, T].

    A position attends to itself and earlier positions: to the `window` last ones if it is given,
    and within its own document if `segment_ids` [B, T] number the documents packed into a row.
    """
    ones = jnp.ones((length, length), dtype=bool)
    mask = jnp.tril(ones)[None]
    if window is not None:
        mask = mask & ~jnp.tril(ones, -window)
    if segment_ids is None:
        return mask
    return mask & (segment_ids[:, :, None] == segment_ids[:, None, :])


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Callable[[Array], Array] | None = None,
) -> Array:
    """softmax(Q·Kᵀ/√scale)·V for each head; every group of query heads shares one key/value head.

    Queries are [B, T, H, C], keys and values [B, S, K, C], where K divides H; the mask is bool
    [1 or B, T, S], true where a query may attend, and the result [B, T, H, C]. By default, scale is
    C. Scores are bounded to ± softcap by softcap · tanh(score / softcap); dropout drops weights.
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    query = query.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgc,bskc->bkgts", query, key) / math.sqrt(scale or head_dim)
    # Half precision would lose the small weights of a long row; float64 stays float64.
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    weights = weights if dropout is None else dropout(weights)
    mixed = jnp.einsum("bkgts,bskc->btkgc", weights, value)
    return mixed.reshape(batch, length, num_heads, head_dim)


def row_positions(tokens: Array, positions: Array | None, context_length: int) -> Array:
    """Return the position of each token, [T] or [B, T]: as given, or counted from 0.

    Rows of more tokens than the model has positions are refused.
    """
    length = tokens.shape[1]
    if length > context_length:
        raise ValueError(
            f"The model knows {context_length} positions, but the batch has {length} "
            f"tokens a row; build it with context_length={length} or shorten the rows."
        )
    return jnp.arange(length) if positions is None else positions
