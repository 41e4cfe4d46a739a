"""Records of the inputs and outputs of a stage's forward and backward passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

from meshwright.pipeline.aliases import Array, BlockRow, LeafValues, Message
from meshwright.pipeline.divide.stage_functions import Losses, Microbatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardMessage:
    """Gradients for the previous stage, or values from an input gradient for its weight gradient.

    Attributes:
        values: the gradients, or the values that the weight gradient needs.
        weight: the weight of the microbatch, by which gradients of weights are multiplied at the
            end; None if they already include it, as they do unless the loss is scaled.
    """

    values: list[Array]
    weight: Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeights:
    """The weights that the blocks of a chunk read, or their gradients.

    Attributes:
        rows: the weights of each block.
        outer: the weights outside of the blocks.
    """

    rows: list[BlockRow]
    outer: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockSums:
    """The sums to which gradients of blocks are added.

    Attributes:
        weights: for each block of a chunk, its sums, each [chunks, …].
        outer: sums for the weights outside of the blocks.
    """

    weights: list[BlockRow]
    outer: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CallInputs:
    """Inputs of a chunk without a gradient, which differ from microbatch to microbatch.

    Attributes:
        others: the leaves of the message that have no gradient.
        changing: for each block, the state it replaces.
        microbatch: batch leaves and outer state of the microbatch.
        virtual_stage: the number of the virtual stage.
    """

    others: list[Array]
    changing: list[BlockRow]
    microbatch: Microbatch
    virtual_stage: Array


class HeldValues(NamedTuple):
    """The values that both forward and backward of a chunk read.

    Attributes:
        weights: its weights.
        fixed: its constant leaves.
        casts: weights and constant leaves in the dtypes in which they are read.
    """

    weights: BlockWeights
    fixed: list[BlockRow]
    casts: tuple[BlockWeights, list[BlockRow]]


class ChunkResult(NamedTuple):
    """The results of a chunk's forward pass: message, saved values for backward, and new state."""

    message: Message
    saved: list[Array]
    changing: list[BlockRow]


class HeadGradient(NamedTuple):
    """The losses of a microbatch, gradients of the head's weights, and of its input."""

    losses: Losses
    outer: LeafValues
    back: BackwardMessage
