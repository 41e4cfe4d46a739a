"""What tasks share: the fields of a batch, weighted means, and cross entropy."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.errors import UserError
from meshwright.weighted import Weighted

Batch = Mapping[str, Array]
"""Arrays by field name; dim 0 of every array is the sample."""

Metrics = dict[str, Weighted]
"""What is reported besides the loss, each as a total and a weight."""


def read_field(batch: Batch, *names: str) -> Array:
    """Return the first of these fields that the batch has."""
    for name in names:
        if name in batch:
            return batch[name]
    raise UserError(
        f"the batch has no field {' or '.join(repr(name) for name in names)}",
        why=f"its fields are {', '.join(repr(name) for name in batch) or 'none'}",
        fix=f"name the array {names[0]!r} where the batch is made",
    )


def read_weights(batch: Batch, values: Array) -> Array:
    """Return how much each value counts: the batch's ``mask``, or one each."""
    if "mask" not in batch:
        return jax.numpy.ones_like(values)
    mask = batch["mask"]
    if mask.shape != values.shape:
        raise UserError(
            "the mask does not fit the targets",
            why=f"the mask has shape {mask.shape}, the targets have {values.shape}",
            fix="give one mask value per target",
        )
    return mask.astype(values.dtype)


def weigh(values: Array, weights: Array) -> Weighted:
    """Return the weighted sum of the values with the sum of the weights."""
    values = values.astype(weights.dtype)
    return Weighted(total=(values * weights).sum(), weight=weights.sum())


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return -log softmax(logits)[label] in nats: logits [..., V], labels [...] → [...].

    Computed in float32, or in the logits' own type if that is wider. The label's logit is selected
    by comparison instead of indexing, so that logits sharded over V need a small sum, no gather.
    """
    shape = getattr(logits, "shape", None)
    if shape is None or shape[:-1] != labels.shape:
        raise UserError(
            "the model does not return logits of the targets",
            why=f"the targets have shape {labels.shape}; it returns "
            + (f"a {type(logits).__name__}" if shape is None else f"an array of shape {shape}"),
            fix="return logits alone: an array of the targets' shape and one dimension more, with "
            f"a logit for each class ({', '.join('BT'[: labels.ndim])}, V)",
        )
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    classes = jnp.arange(logits.shape[-1])
    picked = jnp.where(classes == labels[..., None], logits, 0).sum(axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def is_correct(logits: Array, labels: Array) -> Array:
    """Return whether the label has the highest logit: logits [..., V], labels [...] → [...]."""
    return jnp.argmax(logits, axis=-1) == labels
