"""GradientAccumulator: the mean gradient of several microbatches, for loops written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.errors import UserError


@dataclass(frozen=True)
class GradientAccumulatorConfig:
    """How many microbatches make an update.

    Attributes:
        accumulation_steps: microbatches per update.
        normalize_gradients: give the mean of what was accumulated; the sum otherwise.
    """

    accumulation_steps: int = 1
    normalize_gradients: bool = True

    def __post_init__(self) -> None:
        if self.accumulation_steps < 1:
            raise UserError(
                f"accumulation_steps={self.accumulation_steps} is not valid",
                why="an update needs at least one microbatch",
                fix="write accumulation_steps=1 for no accumulation",
            )


class GradientAccumulator:
    """Adds up gradients until an update is due.

    It lives on the host, between compiled functions. `meshwright.Trainer` accumulates inside its
    compiled step instead.

    Args:
        config: how many microbatches make an update.
    """

    def __init__(self, config: GradientAccumulatorConfig) -> None:
        self.config = config
        self.reset()

    @property
    def current_step(self) -> int:
        """Microbatches accumulated since the last update."""
        return self._count

    def accumulate(self, grads: Any, weight: Array | float = 1.0) -> None:
        """Add the gradients of one microbatch's mean loss.

        Args:
            grads: any pytree of arrays, NNX states included.
            weight: how much the microbatch counts, such as its number of tokens.
        """
        leaves, treedef = jax.tree.flatten(grads)
        if self._count == 0:
            self._treedef = treedef
            self._dtypes = tuple(jnp.result_type(leaf) for leaf in leaves)
            self._sums, self._weight = _start(leaves, weight)
        else:
            _check_alike(self._treedef, self._sums, treedef, leaves)
            self._sums, self._weight = _add(self._sums, self._weight, leaves, weight)
        self._count += 1

    def should_update(self, step: int) -> bool:
        """Whether the microbatch with this number, counted from 0, completes an update."""
        return (step + 1) % self.config.accumulation_steps == 0

    def get_gradients(self) -> Any:
        """Return the mean of what was accumulated, in the gradients' own formats, and start anew.

        A window that is not full, such as an epoch's last, gives the mean of what it holds.
        """
        if self._count == 0:
            raise UserError("nothing was accumulated", fix="call accumulate(grads) first")
        weight = self._weight if self.config.normalize_gradients else 1.0
        leaves = _divide(self._sums, weight, self._dtypes)
        treedef = self._treedef
        self.reset()
        return jax.tree.unflatten(treedef, leaves)

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._count = 0
        self._sums: list[Array] = []
        self._weight: Any = None
        self._treedef: Any = None
        self._dtypes: tuple[Any, ...] = ()


def _check_alike(treedef: Any, sums: list[Array], other: Any, leaves: list[Any]) -> None:
    if treedef != other:
        raise UserError(
            "the gradients have another structure than those accumulated so far",
            why=f"first {treedef}, now {other}",
            fix="call reset() before gradients of another model",
        )
    for total, leaf in zip(sums, leaves, strict=True):
        if total.shape != np.shape(leaf):
            raise UserError(
                "the gradients have other shapes than those accumulated so far",
                why=f"first {total.shape}, now {np.shape(leaf)}",
                fix="call reset() before gradients of another model",
            )


@jax.jit
def _start(leaves: list[Any], weight: Array | float) -> tuple[list[Array], Array]:
    return [_weighted(leaf, weight) for leaf in leaves], jnp.asarray(weight, jnp.float32)


@partial(jax.jit, donate_argnums=(0, 1))
def _add(
    sums: list[Array], total: Array, leaves: list[Any], weight: Array | float
) -> tuple[list[Array], Array]:
    added = [s + _weighted(leaf, weight) for s, leaf in zip(sums, leaves, strict=True)]
    return added, total + jnp.asarray(weight, jnp.float32)


@partial(jax.jit, static_argnums=2)
def _divide(sums: list[Array], weight: Array | float, dtypes: tuple[Any, ...]) -> list[Array]:
    divisor = jnp.where(jnp.asarray(weight) == 0, 1, weight)
    return [
        (s / jnp.asarray(divisor, s.dtype)).astype(dtype)
        for s, dtype in zip(sums, dtypes, strict=True)
    ]


def _weighted(leaf: Any, weight: Array | float) -> Array:
    """Return a gradient times its weight, in float32 or wider: half precision would lose sums."""
    wide = jnp.promote_types(jnp.result_type(leaf), jnp.float32)
    return jnp.asarray(leaf, wide) * jnp.asarray(weight, wide)
