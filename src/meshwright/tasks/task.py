"""What tasks share: the protocol, the fields of a batch, and cross entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.errors import UserError
from meshwright.weighted import Weighted

Batch = Mapping[str, Array]
"""Arrays by field name; dim 0 of every array is the sample."""

Metrics = dict[str, Weighted]
"""What is reported besides the loss, each as a total and a weight."""


class Task(Protocol):
    """What a model is trained for."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Weighted, Metrics]:
        """Run the model on the batch; return what to minimise and what to report."""
        ...

    def example_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a batch with this many samples."""
        ...

    def synthetic_batch(self, seed: int, batch_size: int) -> dict[str, np.ndarray]:
        """Return a batch a model can learn from, which depends on the seed alone."""
        ...


def read_field(batch: Batch, *names: str) -> Array:
    """Return the first of these fields that the batch has."""
    for name in names:
        if name in batch:
            return batch[name]
    raise UserError(
        f"The batch has no field {' or '.join(repr(name) for name in names)}.",
        why=f"Its fields are {', '.join(repr(name) for name in batch) or 'none'}.",
        fix=f"Name the array {names[0]!r} where the batch is made.",
    )


def read_weights(batch: Batch, values: Array) -> Array:
    """Return how much each value counts: the batch's ``mask``, or one each."""
    if "mask" not in batch:
        return jax.numpy.ones_like(values)
    mask = batch["mask"]
    if mask.shape != values.shape:
        raise UserError(
            "The mask does not fit the targets.",
            why=f"The mask has shape {mask.shape}, the targets have {values.shape}.",
            fix="Give one mask value per target.",
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
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    classes = jnp.arange(logits.shape[-1])
    picked = jnp.where(classes == labels[..., None], logits, 0).sum(axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def is_correct(logits: Array, labels: Array) -> Array:
    """Return whether the label has the highest logit: logits [..., V], labels [...] → [...]."""
    return jnp.argmax(logits, axis=-1) == labels
