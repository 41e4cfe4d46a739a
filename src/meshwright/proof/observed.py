"""What a training run shows to whoever compares it with another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.trees import key_data

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
        withheld: leaves whose gradient was rounding noise in every update, which the optimizer
            was given as zero.
    """

    losses: list[float]
    gradients: Leaves
    parameters: Leaves
    state: Leaves
    loss_scale: float = 1.0
    withheld: frozenset[str] = frozenset()


def fetch(values: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Bring values to the host; random keys as the words they consist of."""
    words = {path: key_data(value) for path, value in values.items()}
    return {path: np.asarray(value) for path, value in jax.device_get(words).items()}


def withhold(gradients: Any, paths: Collection[str]) -> Any:
    """Return gradients as an optimizer gets them, zero for the leaves at these paths.

    An optimizer that divides by the size of a gradient, or takes its sign, makes a whole step of
    what is rounding noise around a true zero, and no two machines round alike.
    """

    def hand_over(path: Any, gradient: Any) -> Any:
        text = jax.tree_util.keystr(path, simple=True, separator=".")
        return jnp.zeros_like(gradient) if text in paths else gradient

    return jax.tree_util.tree_map_with_path(hand_over, gradients) if paths else gradients
