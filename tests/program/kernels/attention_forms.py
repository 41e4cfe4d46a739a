"""Attention as people write it, each form a function of query, key and value [B, T, H, C]."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.models.attention import attend, causal_mask

SAMPLES, LENGTH, HEADS, CHANNELS = 4, 16, 4, 8
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
NEITHER = "its mask is neither causal, nor a sliding window, nor full"


def causal():
    return jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def heads_first(*arrays):
    return [a.transpose(0, 2, 1, 3) for a in arrays]


def by_library(**options):
    return lambda q, k, v, batch: jax.nn.dot_product_attention(q, k, v, **options)


def by_library_masked(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, mask=causal()[None, None])


def grouped(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], is_causal=True)


def repeated(q, k, v, batch):
    k, v = (jnp.repeat(a[:, :, :2], 2, axis=2) for a in (k, v))
    return by_hand()(q, k, v, batch)


def by_hand(mask=lambda s: jnp.where(causal(), s, -jnp.inf), softmax=None, scale=None, end=None):
    """Return attention with heads first; ``mask``, ``softmax``, ``scale`` and ``end`` differ."""
    softmax = softmax or (lambda s: jax.nn.softmax(s, axis=-1))
    scale = scale or (lambda s: s / math.sqrt(CHANNELS))

    def attention(q, k, v, batch):
        q, k, v = heads_first(q, k, v)
        weights = softmax(mask(scale(q @ k.transpose(0, 1, 3, 2))))
        weights = weights if end is None else end(weights, batch)
        return (weights @ v).transpose(0, 2, 1, 3)

    return attention


def channels_last(q, k, v, batch):
    scores = jnp.einsum("bthc,bshc->bhts", q, k) * (1 / math.sqrt(CHANNELS))
    weights = jax.nn.softmax(jnp.where(causal(), scores, -1e9))
    return jnp.einsum("bhts,bshc->bthc", weights, v)


def queries_last(q, k, v, batch):
    scores = jnp.einsum("bshc,bthc->bhst", k, q) * 0.25
    weights = jax.nn.softmax(jnp.where(causal().T, scores, -1e9), axis=2)
    return jnp.einsum("bhst,bshc->bthc", weights, v)


def scaled_queries(q, k, v, batch):
    return by_hand(scale=lambda s: s)(q * CHANNELS**-0.5, k, v, batch)


def exponentials(scores):
    raised = jnp.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def single_head(q, k, v, batch):
    q, k, v = (a.reshape(*a.shape[:2], -1) for a in (q, k, v))
    scores = jnp.einsum("btc,bsc->bts", q, k) / 6.0
    mixed = jnp.einsum("bts,bsc->btc", jax.nn.softmax(jnp.where(causal(), scores, -1e9)), v)
    return mixed.reshape(*mixed.shape[:2], HEADS, CHANNELS)


def cross(q, k, v, batch):
    return by_hand(mask=lambda s: s)(q, k[:, :10], v[:, :10], batch)


def hidden_where_zero(scores):
    return jnp.where(jnp.tril(jnp.ones_like(scores[0, 0])) == 0, -1e9, scores)


def window(scores):
    back = distance(scores)
    return jnp.where((back >= 0) & (back < 5), scores, -jnp.inf)


def two_sided(scores):
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :]
    return jnp.where(jnp.abs(distance) < 5, scores, -jnp.inf)


def packed(q, k, v, batch):
    return attend(q, k, v, causal_mask(LENGTH, batch["segments"]))


def packed_window(q, k, v, batch):
    return attend(q, k, v, causal_mask(LENGTH, batch["segments"], window=5))


def packed_by_hand(q, k, v, batch):
    same = batch["segments"][:, None, :, None] == batch["segments"][:, None, None, :]
    return by_hand(mask=lambda s: jnp.where(causal() & same, s, -1e9))(q, k, v, batch)


def packed_twice_masked(q, k, v, batch):
    same = batch["segments"][:, None, :, None] == batch["segments"][:, None, None, :]
    mask = lambda s: jnp.where(same, jnp.where(causal(), s, -1e9), -1e9)  # noqa: E731
    return by_hand(mask=mask)(q, k, v, batch)


def packed_both_ways(q, k, v, batch):
    same = batch["segments"][:, None, :, None] == batch["segments"][:, None, None, :]
    return by_hand(mask=lambda s: jnp.where(same, s, -1e9))(q, k, v, batch)


def checkpointed(q, k, v, batch):
    return jax.checkpoint(lambda q, k, v: by_hand()(q, k, v, None))(q, k, v)


@jax.jit
def masked_call(q, k, v, mask):
    return by_hand(mask=lambda s: jnp.where(mask, s, -1e9))(q, k, v, None)


def called(mask):
    """Return attention by one function for all masks."""
    return lambda q, k, v, batch: masked_call(q, k, v, mask())


def added_to(scores):
    return scores + jnp.where(causal(), 0.0, -1e9)


def with_dropout(weights, batch):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    return jnp.where(kept, weights / 0.9, 0.0)


def data_mask(q, k, v, batch):
    hidden = batch["hidden"][:, None, None, :]
    return by_hand(mask=lambda s: jnp.where(hidden, s, -1e9))(q, k, v, batch)


def read_twice(weights, batch):
    return weights * (1 + weights.mean())


def averaged(weights, batch):
    return jnp.broadcast_to(weights.mean(1, keepdims=True), weights.shape)


def printed(scores):
    jax.debug.callback(lambda value: None, scores.mean())
    return scores


def printed_weights(weights, batch):
    jax.debug.callback(lambda value: None, weights.mean())
    return weights


def striped(scores):
    return jnp.where(jnp.asarray(CAUSAL & (np.indices(CAUSAL.shape).sum(0) % 3 < 2)), scores, -1e9)


def over_heads(q, k, v, batch):
    return by_hand(mask=lambda s: s, softmax=lambda s: jax.nn.softmax(s, axis=1))(q, k, v, batch)


def over_queries(q, k, v, batch):
    return by_hand(mask=lambda s: s, softmax=lambda s: jax.nn.softmax(s, axis=2))(q, k, v, batch)


def soft_cap(scores):
    return 5 * jnp.tanh(scores / 5)


def biased(q, k, v, batch):
    bias = v.mean() * jnp.arange(LENGTH)
    return by_hand(mask=lambda s: s + bias)(q, k, v, batch)


def soft_cap_window(q, k, v, batch):
    """With heads that share keys."""
    by_group = q.reshape(*q.shape[:2], 2, 2, q.shape[3])
    scores = jnp.einsum("btkgc,bskc->bkgts", by_group, k[:, :, :2]) / 3
    scores = window(2 * jnp.tanh(scores / 2))
    mixed = jnp.einsum("bkgts,bskc->btkgc", jax.nn.softmax(scores), v[:, :, :2])
    return mixed.reshape(q.shape)


def distance(scores):
    return jnp.arange(scores.shape[-2])[:, None] - jnp.arange(scores.shape[-1])[None, :]


def alibi(scores):
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)[:, None, None]
    return jnp.where(distance(scores) >= 0, scores - slopes * distance(scores), -jnp.inf)


def padded(q, k, v, batch):
    """Positions that attend to hidden keys alone attend to all keys alike."""
    hidden = batch["hidden"][:, None, None, :]
    hide = lambda s: jnp.where(distance(s) >= 0, jnp.where(hidden, s, -1e9), -1e9)  # noqa: E731
    return by_hand(hide)(q, k, v, batch)


def padded_sums(q, k, v, batch):
    """The same, hidden by sums: those of later keys are as low as those of hidden ones."""
    hidden = (1.0 - batch["hidden"][:, None, None, :]) * -1e9
    hide = lambda s: soft_cap(s) + jnp.where(distance(s) >= 0, 0.0, -1e9) + hidden  # noqa: E731
    return by_hand(hide)(q, k, v, batch)


def packed_soft_cap(q, k, v, batch):
    same = batch["segments"][:, None, :, None] == batch["segments"][:, None, None, :]
    mask = lambda s: jnp.where(same & (distance(s) >= 0), jnp.tanh(s), -1e30)  # noqa: E731
    return by_hand(mask)(q, k, v, batch)


def sigmoids(scores):
    return jnp.where(distance(scores) >= 0, jax.nn.sigmoid(scores - 2), 0)


SCORES = {
    "soft_cap_window": (soft_cap_window, "causal, window 5, its scores are changed by tanh"),
    "alibi": (by_hand(alibi), "causal, its scores are changed by sub"),
    "padded": (padded, "full, its mask depends on data"),
    "padded_sums": (padded_sums, "full, its scores are changed by add"),
    "packed_soft_cap": (
        packed_soft_cap,
        "causal, packed documents, its scores are changed by tanh",
    ),
    "sigmoid": (
        by_hand(lambda s: s, softmax=sigmoids),
        "causal, its weights are sigmoids",
    ),
}
"""By name: a form with a function of its scores, and what is said of it."""

REPLACED = {
    **SCORES,
    "full": (by_library(), "full"),
    "causal": (by_library(is_causal=True), "causal"),
    "grouped": (grouped, "causal"),
    "library_window": (by_library(is_causal=True, local_window_size=(4, 0)), "causal, window 5"),
    "library_mask": (by_library_masked, "causal"),
    "library_scale": (by_library(is_causal=True, scale=0.3), "causal"),
    "heads_first": (by_hand(), "causal"),
    "channels_last": (channels_last, "causal"),
    "queries_last": (queries_last, "causal"),
    "scaled_queries": (scaled_queries, "causal"),
    "scale_computed": (by_hand(scale=lambda s: s / jnp.sqrt(CHANNELS)), "causal"),
    "lowest": (by_hand(lambda s: jnp.where(causal(), s, jnp.finfo(s.dtype).min)), "causal"),
    "inverted": (by_hand(lambda s: jnp.where(~causal(), -1e9, s)), "causal"),
    "equal_zero": (
        by_hand(lambda s: jnp.where(jnp.tril(jnp.ones_like(s[0, 0])) == 0, -1e9, s)),
        "causal",
    ),
    "added": (by_hand(added_to), "causal"),
    "numpy_mask": (by_hand(lambda s: jnp.where(CAUSAL, s, -1e9)), "causal"),
    "another_numpy_mask": (
        by_hand(lambda s: jnp.where(CAUSAL & ~np.tril(CAUSAL, -3), s, -1e9)),
        "causal, window 3",
    ),
    "by_exponentials": (by_hand(softmax=exponentials), "causal"),
    "repeated": (repeated, "causal"),
    "single_head": (single_head, "causal"),
    "cross": (cross, "full"),
    "window": (by_hand(window), "causal, window 5"),
    "packed": (packed, "causal, packed documents"),
    "packed_window": (packed_window, "causal, window 5, packed documents"),
    "packed_by_hand": (packed_by_hand, "causal, packed documents"),
    "packed_twice_masked": (packed_twice_masked, "causal, packed documents"),
    "packed_both_ways": (packed_both_ways, "full, packed documents"),
    "checkpointed": (checkpointed, "causal"),
    "data_mask": (data_mask, "full, its mask depends on data"),
    "biased": (biased, "full, its scores are changed by add"),
    "soft_cap": (by_hand(soft_cap), "full, its scores are changed by tanh"),
    "striped": (by_hand(striped), f"full, {NEITHER}"),
    "two_sided": (by_hand(two_sided), f"full, {NEITHER}"),
    "called": (called(causal), "causal"),
    "called_again": (called(lambda: jnp.ones((LENGTH, LENGTH), bool)), "full"),
}
"""By name: a form that is replaced, and what is said of it."""


NOT_REPLACED = {
    "dropout": (by_hand(end=with_dropout), "its weights are changed by"),
    "over_heads": (over_heads, "batch dim"),
    "over_queries": (over_queries, "sums over something other than the keys"),
    "weights_read": (by_hand(end=read_twice), "read elsewhere"),
    "printed": (by_hand(printed), "read by"),
    "printed_weights": (by_hand(end=printed_weights), "read elsewhere"),
    "averaged": (by_hand(end=averaged), "its weights are changed by"),
}
"""By name: a form that is evaluated as written, and a part of the reason."""
