"""The training state: flat lists of leaves, without a tree to traverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from meshwright.step.scaler import LossScale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything one update reads and writes.

    Attributes:
        params: trained leaves, in the layout's order.
        model_state: the model's other leaves: statistics, counters, random streams.
        optimizer: leaves of the optimizer state.
        step: updates done.
        loss_scale: loss scaling of fp16; None otherwise.
        halted: whether an update was not finite, so that none changes anything until the host has
            dealt with it; None for a step that applies every update. It is not saved.
    """

    params: list[Any]
    model_state: list[Any]
    optimizer: list[Any]
    step: Array
    loss_scale: LossScale | None
    halted: Array | None = None
