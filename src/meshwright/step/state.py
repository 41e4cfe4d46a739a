"""The training state: flat lists of leaves without a tree to traverse, and fp16's loss scale.

The scale is dynamic, and computed on the devices without the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 2000
SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24


@dataclass(frozen=True)
class ScaleRule:
    """How the loss scale changes: it grows after `growth_interval` finite steps in a row.

    After a step that was not finite, it is multiplied by the backoff factor.
    """

    initial_scale: float = INITIAL_SCALE
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = GROWTH_INTERVAL
    min_scale: float = SMALLEST_SCALE
    max_scale: float = LARGEST_SCALE


_DEFAULT_RULE = ScaleRule()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The factor on the loss before differentiation, and how it got there.

    ``good_steps`` counts finite steps since the scale changed; ``skipped`` those not applied.
    """

    scale: Array
    good_steps: Array
    skipped: Array

    @classmethod
    def initial(cls, scale: float = INITIAL_SCALE) -> LossScale:
        """Return the initial scale of a run."""
        return cls(
            jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        )

    @property
    def smallest(self) -> Array:
        """Whether the scale cannot get smaller: what is not finite does not come from it."""
        return self.scale <= SMALLEST_SCALE

    def after(self, finite: Array, rule: ScaleRule = _DEFAULT_RULE) -> LossScale:
        """Return the scale of the next step.

        By default it doubles after 2000 finite steps and halves after one that is not finite.
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


def copied(tree: Any) -> Any:
    """Return arrays that stay alive when a step donates these."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), tree)


def all_finite(tree: object) -> Array:
    """Whether every element of every floating leaf is finite."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in leaves], bool).all()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything one step reads and writes; ``step`` counts those that are done.

    Attributes:
        params: trained leaves, in the layout's order.
        model_state: the model's other leaves: statistics, counters, random streams.
        loss_scale: loss scaling of fp16; None otherwise.
        halted: whether a step was not finite, so that none changes anything until the host has
            dealt with it; None if every step is applied. It is not saved.
    """

    params: list[Any]
    model_state: list[Any]
    optimizer: list[Any]
    step: Array
    loss_scale: LossScale | None
    halted: Array | None = None
