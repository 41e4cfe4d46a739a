"""GradientAccumulator: the mean gradient of several microbatches, for custom training loops."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.errors import UserError
from meshwright.trees import PyTree


@dataclass(frozen=True)
class GradientAccumulatorConfig:
    """The number of microbatches per step.

    Attributes:
        accumulation_steps: microbatches per step.
        normalize_gradients: return the mean of the accumulated gradients instead of their sum.
    """

    accumulation_steps: int = 1
    normalize_gradients: bool = True

    def __post_init__(self) -> None:
        if self.accumulation_steps < 1:
            raise UserError(
                f"accumulation_steps={self.accumulation_steps} is not valid",
                why="a step needs at least one microbatch",
                fix="write accumulation_steps=1 for no accumulation",
            )


class GradientAccumulator:
    """Accumulates gradients until an optimizer step is due.

    It is called from Python, between compiled functions. `meshwright.Trainer` accumulates inside
    its compiled step instead.

    Args:
        config: the number of microbatches per step.
    """

    def __init__(self, config: GradientAccumulatorConfig) -> None:
        self.config = config
        self.reset()

    @property
    def current_step(self) -> int:
        """Microbatches accumulated since the last step."""
        return self._count

    @property
    def accumulated_grads(self) -> PyTree | None:
        """The sum of the gradients accumulated so far, times their weights; None if there are none.

        It is a copy, at least float32, and stays valid while accumulation continues.
        """
        if self._count == 0:
            return None
        return jax.tree.unflatten(self._treedef, [jnp.copy(total) for total in self._sums])

    def accumulate(self, grads: PyTree, weight: Array | float = 1.0) -> None:
        """Add the gradients of one microbatch's mean loss.

        Args:
            grads: any pytree of arrays, NNX states included.
            weight: the weight of the microbatch, such as its number of tokens.
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
        """Whether microbatch number ``step``, counted from 0, completes an optimizer step."""
        return (step + 1) % self.config.accumulation_steps == 0

    def get_gradients(self) -> PyTree:
        """Return the mean of the accumulated gradients in their own dtypes, and reset.

        With fewer microbatches than a step has, as at the end of an epoch, it is their mean.
        """
        if self._count == 0:
            raise UserError("nothing was accumulated", fix="call accumulate(grads) first")
        weight = self._weight if self.config.normalize_gradients else 1.0
        leaves = _divide(self._sums, weight, self._dtypes)
        treedef = self._treedef
        self.reset()
        return jax.tree.unflatten(treedef, leaves)

    def reset(self) -> None:
        """Discard the accumulated gradients."""
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
            fix="call reset() before accumulating gradients of another model",
        )
    for total, leaf in zip(sums, leaves, strict=True):
        if total.shape != np.shape(leaf):
            raise UserError(
                "the gradients have other shapes than those accumulated so far",
                why=f"first {total.shape}, now {np.shape(leaf)}",
                fix="call reset() before accumulating gradients of another model",
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
    """Return a gradient times its weight, in at least float32: half precision is too coarse."""
    wide = jnp.promote_types(jnp.result_type(leaf), jnp.float32)
    return jnp.asarray(leaf, wide) * jnp.asarray(weight, wide)
