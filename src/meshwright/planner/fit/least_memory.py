"""The memory without which no update is possible: state, gradients and batch, known exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.step.assemble import Assembled
from meshwright.text.units import human_bytes


@dataclass(frozen=True)
class LeastMemory:
    """Bytes per device that a step needs before it computes anything.

    Attributes:
        parameters: trained parameters and the model's other state.
        optimizer: the optimizer's state.
        gradients: gradients that exist at the same time; 0 if each can be used and dropped.
        batch: the samples of an update.
    """

    parameters: int
    optimizer: int
    gradients: int
    batch: int

    @property
    def state(self) -> int:
        """Bytes of the training state."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """All of them together."""
        return self.state + self.gradients + self.batch

    def __str__(self) -> str:
        named = {
            "parameters": self.parameters,
            "optimizer state": self.optimizer,
            "gradients": self.gradients,
            "batch": self.batch,
        }
        return " + ".join(f"{human_bytes(n)} of {what}" for what, n in named.items() if n)


def least_memory(assembled: Assembled) -> LeastMemory:
    """Return what a step needs at least, from the placement of every leaf."""
    step, layout = assembled.step, assembled.traced.layout
    state = step.abstract_state()
    # Gradients must all be finite before the first parameter changes, or they are added up.
    together = state.halted is not None or assembled.plan.batch.gradient_accumulation_steps > 1
    placed = zip(layout.step_leaves, assembled.decision.gradients, strict=True)
    gradients = [
        jax.ShapeDtypeStruct(
            leaf.leaf.shape, leaf.leaf.dtype, sharding=NamedSharding(assembled.mesh, place.spec)
        )
        for leaf, place in placed
        if leaf.leaf.role == "param"
    ]
    return LeastMemory(
        parameters=bytes_on_device([state.params, state.model_state]),
        optimizer=bytes_on_device(state.optimizer),
        gradients=bytes_on_device(gradients) if together else 0,
        batch=bytes_on_device(batch_shapes(assembled)),
    )


def batch_shapes(assembled: Assembled) -> list[jax.ShapeDtypeStruct]:
    """Return the leaves of a global batch as shapes on the mesh."""
    size = assembled.plan.batch.global_batch_size
    return [
        jax.ShapeDtypeStruct(
            (size, *leaf.shape[1:]), leaf.dtype, sharding=assembled.step.shardings.batch
        )
        for leaf in assembled.traced.batch
    ]


def bytes_on_device(tree: Any) -> int:
    """Return the bytes that the shards of arrays, or of their shapes, have on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
