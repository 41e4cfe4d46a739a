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
        accumulation_steps: microbatches between two updates.
        normalize_gradients: return the mean of what was accumulated; the sum otherwise.
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
    compiled step instead, which keeps only one set of gradients.

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
        weight = jnp.asarray(weight, jnp.float32)
        if self._sums is None:
            self._dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(grads)]
            self._sums, self._weight = _start(grads, weight)
        else:
            _check_alike(self._sums, grads)
            self._sums, self._weight = _add(self._sums, self._weight, grads, weight)
        self._count += 1

    def should_update(self, step: int) -> bool:
        """Whether the microbatch with this number, counted from 0, completes an update."""
        return (step + 1) % self.config.accumulation_steps == 0

    def get_gradients(self) -> Any:
        """Return the mean of what was accumulated, in its own formats, and start anew.

        Fewer microbatches than `accumulation_steps`, at the end of an epoch, give their own mean.
        """
        if self._sums is None:
            raise UserError("nothing was accumulated", fix="call accumulate(grads) first")
        # A sum is a mean that is not divided.
        weight = self._weight if self.config.normalize_gradients else jnp.ones((), jnp.float32)
        dtypes = jax.tree.unflatten(jax.tree.structure(self._sums), self._dtypes)
        mean = _divide(self._sums, weight, _Static(tuple(jax.tree.leaves(dtypes))))
        self.reset()
        return mean

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._sums: Any = None
        self._weight: Any = None
        self._dtypes: list[Any] = []
        self._count = 0
