"""What a training run shows to whoever compares it with another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Leaves = Mapping[str, np.ndarray[Any, Any]]
"""Values on the host by canonical path."""


@dataclass(frozen=True)
class Observed:
    """A training run.

    Attributes:
        losses: mean loss of every update.
        gradients: of the first update, before clipping.
        parameters: after the last update.
        state: the model's other leaves after the last update.
        loss_scale: factor on the loss while the gradients were taken.
    """

    losses: list[float]
    gradients: Leaves
    parameters: Leaves
    state: Leaves
    loss_scale: float = 1.0


def fetch(values: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Bring values to the host; random keys as the words they consist of."""
    words = {path: _words(value) for path, value in values.items()}
    return {path: np.asarray(value) for path, value in jax.device_get(words).items()}


def _words(value: Any) -> Any:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value
