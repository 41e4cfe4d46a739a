"""What executors run: a model as three functions, and the values and sums of a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jax import Array

from meshwright.weighted import Weighted

LeafValues = dict[int, Array]
"""Values of step leaves by the number of the step leaf."""

BlockRow = dict[int, Array]
"""The leaves of one block, by position among the layered inputs of the scan."""

Message = list[Array]
"""The arrays that one stage sends to the next."""


class Losses(NamedTuple):
    """Totals and weights of the objective and of the metrics."""

    objective: Weighted
    metrics: dict[str, Weighted]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Microbatch:
    """The inputs of one microbatch; for several, dim 0 of each array counts microbatches.

    ``state`` are the changing leaves outside the blocks, as they are before this microbatch.
    """

    batch: list[Array]
    state: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInputs:
    """The inputs of the blocks of one virtual stage.

    Where gradients are computed, the message at first has only the leaves without one. Blocks
    replace ``changing``; ``outer`` are the trained leaves outside the blocks that they read.
    """

    message: Message
    changing: list[BlockRow]
    microbatch: Microbatch
    virtual_stage: Array
    weights: list[BlockRow] = field(default_factory=list[BlockRow])
    fixed: list[BlockRow] = field(default_factory=list[BlockRow])
    outer: LeafValues = field(default_factory=dict[int, Array])


class BlockOutputs(NamedTuple):
    """The outputs of the blocks of a virtual stage: a message, and each block's new state."""

    message: Message
    changing: list[BlockRow]


@dataclass(frozen=True)
class StageFunctions:
    """A model cut into stages, as functions of one microbatch.

    ``embed_reads``, ``blocks_read`` and ``head_reads`` are the outer weights that each reads, by
    number of the step leaf.
    """

    embed: Callable[[LeafValues, Microbatch], Message]
    blocks: Callable[[BlockInputs], BlockOutputs]
    head: Callable[[LeafValues, Message, Microbatch], Losses]
    embed_reads: tuple[int, ...]
    blocks_read: tuple[int, ...]
    head_reads: tuple[int, ...]


@dataclass(frozen=True)
class StageValues:
    """The leaves of one stage during a batch.

    Those of its blocks are [chunks × blocks, …]; ``outer`` are trained leaves outside the blocks.
    """

    weights: BlockRow
    fixed: BlockRow
    changing: BlockRow
    outer: LeafValues
    microbatches: Microbatch

    def pick(self, numbers: Sequence[int]) -> LeafValues:
        """Return the outer weights with these numbers."""
        return {n: self.outer[n] for n in numbers}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageSums:
    """The sums of a stage over microbatches.

    Gradients are weighted, those of a chunk's blocks [chunks, …] each. ``outer`` and ``losses`` are
    its shares of what all stages add up, ``changing`` the state of its blocks afterwards.
    """

    weights: list[BlockRow]
    outer: LeafValues
    losses: Losses
    changing: BlockRow
