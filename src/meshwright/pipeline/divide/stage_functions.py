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

    Attributes:
        batch: the leaves of the batch.
        state: the changing leaves outside the blocks, as they are before this microbatch.
    """

    batch: list[Array]
    state: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInputs:
    """The inputs of the blocks of one virtual stage.

    Attributes:
        message: the message of the previous stage; where gradients are computed, at first only its
            leaves without one.
        changing: the state that each block replaces.
        microbatch: the inputs of the microbatch.
        virtual_stage: the number of the virtual stage.
        weights: the trained leaves of each block.
        fixed: the constant leaves of each block.
        outer: the trained leaves outside the blocks that blocks read.
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

    Attributes:
        embed: from the outer weights it reads and a microbatch to the first block's input.
        blocks: the blocks of one virtual stage, one after another.
        head: from the outer weights it reads, the last message and a microbatch to the losses.
        embed_reads: step leaves of the outer weights that ``embed`` reads.
        blocks_read: those that ``blocks`` reads.
        head_reads: those that ``head`` reads.
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

    Attributes:
        weights: trained leaves of its blocks, each [chunks × blocks, …].
        fixed: constant leaves of its blocks.
        changing: state of its blocks, which every forward pass replaces.
        outer: trained leaves outside the blocks.
        microbatches: the inputs of the microbatches, each array [microbatches, …].
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

    Attributes:
        weights: for each block of a chunk, weighted sums of its gradients, each [chunks, …].
        outer: its share of the outer weights' gradients.
        losses: its share of totals and weights: all of it on the last stage.
        changing: the state of its blocks afterwards.
    """

    weights: list[BlockRow]
    outer: LeafValues
    losses: Losses
    changing: BlockRow
