"""Weighted: a mean kept as its total and its weight, so that parts add up to the whole."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A sum of per-item values and the number (or weight) of the items behind it.

    Means of unequal parts cannot be averaged; totals and weights can be added. Microbatches with
    different token counts are therefore summed leaf by leaf and divided once per update.

    Attributes:
        total: scalar, the weighted sum of the items' values.
        weight: scalar, the sum of the items' weights.
    """

    total: jax.Array
    weight: jax.Array

    @property
    def mean(self) -> jax.Array:
        """``total / weight``, and zero (with zero gradient) where nothing was counted."""
        return self.total / jnp.where(self.weight == 0, 1, self.weight)
