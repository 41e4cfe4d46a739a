"""What the zoo needs to know about a model: how it is built, its loss, its batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optax
from flax import nnx

SAMPLES = 32


@dataclass(frozen=True)
class Entry:
    """A model as its author would publish it; ``blocks`` says whether it has repeated blocks."""

    model: Callable[..., nnx.Module]
    loss: Callable[..., Any]
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]
    optimizer: optax.GradientTransformation = field(default_factory=lambda: optax.adam(1e-3))
    trainable: Any = nnx.Param
    blocks: bool = False

    def batches(self, step: int) -> dict[str, np.ndarray]:
        """Return the batch of a step."""
        return self.batch(np.random.default_rng(step))


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Return normally distributed float32 numbers, a row for each sample."""
    return random.normal(size=(SAMPLES, *shape)).astype(np.float32)


def integers(random: np.random.Generator, high: int, *shape: int) -> np.ndarray:
    """Return integers below ``high``, a row for each sample."""
    return random.integers(high, size=(SAMPLES, *shape), dtype=np.int32)
