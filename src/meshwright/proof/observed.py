"""The values of a training run that are compared with those of another run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshwright.trees import key_data

Leaves = Mapping[str, np.ndarray[Any, Any]]
"""Values on the host by canonical path."""

Masks = Mapping[str, np.ndarray[Any, Any]]
"""By path, which elements are meant; no path, no element."""


@dataclass(frozen=True)
class ObservedRun:
    """Losses, gradients and final values of a training run.

    Attributes:
        losses: the mean loss of every update.
        gradients: gradients of the first update, before clipping.
        parameters: parameters after the last update, or as one call of the loss leaves them.
        state: the model's other leaves after the last update.
        withheld: elements whose gradient was rounding noise in every update; the optimizer got
            zeros for them.
        metrics: the metrics of every update: those of the loss, and the norm of the gradients.
        written: paths of the parameters that the model writes to in its call.
    """

    losses: list[float]
    gradients: Leaves
    parameters: Leaves
    state: Leaves
    withheld: Masks = field(default_factory=dict[str, np.ndarray[Any, Any]])
    metrics: Sequence[Mapping[str, float]] = ()
    written: frozenset[str] = frozenset()

    def kept(self, written: Iterable[str]) -> Leaves:
        """Return the state, and the parameters that some run has written to."""
        return {**self.state, **{path: self.parameters[path] for path in sorted(written)}}


def fetch(values: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Copy values to the host; random keys become the integers they consist of."""
    words = {path: key_data(value) for path, value in values.items()}
    return {path: np.asarray(value) for path, value in jax.device_get(words).items()}
