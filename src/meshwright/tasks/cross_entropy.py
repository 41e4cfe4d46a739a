"""Cross entropy and accuracy of logits against integer labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return -log softmax(logits)[label] in nats: logits [..., V], labels [...] → [...].

    Computed in float32, or in the logits' own type if that is wider. The label's logit is selected
    by comparison instead of indexing, so that logits sharded over V need a small sum, no gather.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    classes = jnp.arange(logits.shape[-1])
    picked = jnp.where(classes == labels[..., None], logits, 0).sum(axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def is_correct(logits: Array, labels: Array) -> Array:
    """Return whether the label has the highest logit: logits [..., V], labels [...] → [...]."""
    return jnp.argmax(logits, axis=-1) == labels
