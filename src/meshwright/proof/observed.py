"""The values of a training run that are compared with those of another run."""

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
class ObservedRun:
    """Losses, gradients and final values of a training run.

    Attributes:
        losses: the mean loss of every update.
        gradients: gradients of the first update, before clipping.
        parameters: parameters after the last update.
        state: the model's other leaves after the last update.
        loss_scale: factor on the loss before differentiation.
        withheld: leaves whose gradient was rounding noise in every update; the optimizer got zeros
            for them.
    """

    losses: list[float]
    gradients: Leaves
    parameters: Leaves
    state: Leaves
    loss_scale: float = 1.0
    withheld: frozenset[str] = frozenset()


def fetch(values: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Copy values to the host; random keys become the integers they consist of."""
    words = {path: key_data(value) for path, value in values.items()}
    return {path: np.asarray(value) for path, value in jax.device_get(words).items()}


def withhold(gradients: Any, paths: Collection[str]) -> Any:
    """Return the gradients with zeros for the leaves at these paths.

    An optimizer that divides by the size of a gradient, or takes its sign, turns rounding noise
    around a true zero into a full step, and rounding differs between devices.
    """

    def zero_if_withheld(path: Any, gradient: Any) -> Any:
        dotted = jax.tree_util.keystr(path, simple=True, separator=".")
        return jnp.zeros_like(gradient) if dotted in paths else gradient

    return jax.tree_util.tree_map_with_path(zero_if_withheld, gradients) if paths else gradients
