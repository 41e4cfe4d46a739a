"""Dynamic loss scaling for fp16: kept on the device, without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 2000
SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24


@dataclass(frozen=True)
class ScaleRule:
    """How the scale of the loss changes.

    Attributes:
        initial_scale: the first scale.
        growth_factor: what it is multiplied by after `growth_interval` finite updates in a row.
        backoff_factor: what it is multiplied by after an update that was not finite.
        growth_interval: finite updates in a row before it grows.
        min_scale: the smallest scale.
        max_scale: the largest scale.
    """

    initial_scale: float = INITIAL_SCALE
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = GROWTH_INTERVAL
    min_scale: float = SMALLEST_SCALE
    max_scale: float = LARGEST_SCALE


_USUAL = ScaleRule()


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

    def after(self, finite: Array, rule: ScaleRule = _USUAL) -> LossScale:
        """Return the next update's scale: doubled after 2000 good ones, halved after one bad.

        ``rule`` holds other numbers than these.
        """
        good = jnp.where(finite, self.good_steps + 1, 0)
        grow = good >= rule.growth_interval
        growth = jnp.where(grow, rule.growth_factor, 1.0)
        factor = jnp.where(finite, growth, rule.backoff_factor)
        return LossScale(
            jnp.clip(self.scale * factor, rule.min_scale, rule.max_scale),
            jnp.where(grow, 0, good),
            self.skipped + jnp.where(finite, 0, 1),
        )


def all_finite(tree: object) -> Array:
    """Whether every element of every floating leaf is finite."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in leaves], bool).all()
