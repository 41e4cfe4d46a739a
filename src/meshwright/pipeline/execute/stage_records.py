"""What the forward and backward passes of a stage take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

from meshwright.pipeline.aliases import Array, BlockRow, LeafValues, Message
from meshwright.pipeline.divide.stage_functions import Losses, Microbatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardMessage:
    """What goes back from stage to stage, or from an input gradient to its weight gradient.

    Attributes:
        values: gradients, or what a weight gradient needs of them.
        weight: of the microbatch, by which gradients of weights are multiplied at the end; None
            if they hold it already, as they do unless the loss is scaled.
    """

    values: list[Array]
    weight: Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeights:
    """The weights that the blocks of a chunk read, or their gradients.

    Attributes:
        rows: block by block, its own.
        outer: those outside of the blocks.
    """

    rows: list[BlockRow]
    outer: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockSums:
    """The sums to which gradients of blocks are added.

    Attributes:
        weights: of the stage's own blocks, each [chunks × blocks, …].
        outer: of the weights outside of the blocks.
    """

    weights: BlockRow
    outer: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CallInputs:
    """Inputs of a chunk without a gradient, which differ from microbatch to microbatch.

    Attributes:
        others: the leaves of the message that have no gradient.
        changing: block by block, the state it replaces.
        microbatch: what the microbatch brings.
        virtual_stage: the number of the virtual stage.
    """

    others: list[Array]
    changing: list[BlockRow]
    microbatch: Microbatch
    virtual_stage: Array


class HeldValues(NamedTuple):
    """What the forward and the backward of a chunk both read: weights and constant leaves."""

    weights: BlockWeights
    fixed: list[BlockRow]


class ChunkResult(NamedTuple):
    """What a chunk's forward pass gives: a message, values for its backward, and new state."""

    message: Message
    kept: list[Array]
    changing: list[BlockRow]


class HeadGradient(NamedTuple):
    """The losses of a microbatch, gradients of the head's weights, and what goes back."""

    losses: Losses
    outer: LeafValues
    back: BackwardMessage
