"""Weighted: a mean stored as a total and a weight, so that parts can be added."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A sum of per-item values and the number (or weight) of the items behind it.

    Means of unequal parts cannot be averaged, but totals and weights can be added. Microbatches
    with different token counts are therefore summed, and divided once per step.

    Attributes:
        total: scalar, the weighted sum of the items' values.
        weight: scalar, the sum of the items' weights.
    """

    total: jax.Array
    weight: jax.Array

    @property
    def mean(self) -> jax.Array:
        """``total / weight``, or zero (with zero gradient) if the weight is zero."""
        return self.total / jnp.where(self.weight == 0, 1, self.weight)
