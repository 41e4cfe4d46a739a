"""Dynamic loss scaling for fp16: kept on the device, without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 2000
SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The scale of the loss and how it has fared.

    Attributes:
        scale: factor on the loss before gradients are taken.
        good_steps: finite updates since the scale last changed.
        skipped: updates that were not applied because a gradient was not finite.
    """

    scale: Array
    good_steps: Array
    skipped: Array

    @classmethod
    def initial(cls, scale: float = INITIAL_SCALE) -> LossScale:
        """Return the scale a run starts with."""
        return cls(
            jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        )

    def after(self, finite: Array) -> LossScale:
        """Return the next update's scale: doubled after 2000 good ones, halved after one bad."""
        good = jnp.where(finite, self.good_steps + 1, 0)
        grow = good >= GROWTH_INTERVAL
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        return LossScale(
            jnp.clip(self.scale * factor, SMALLEST_SCALE, LARGEST_SCALE),
            jnp.where(grow, 0, good),
            self.skipped + jnp.where(finite, 0, 1),
        )


def all_finite(tree: object) -> Array:
    """Whether every element of every floating leaf is finite."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
