"""What executors run: a model cut into three functions, what a stage holds and adds up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax

from meshwright.pipeline.aliases import Array, BlockRow, LeafValues, Message
from meshwright.weighted import Weighted


class Losses(NamedTuple):
    """Totals and weights of what is minimised, and of what is reported."""

    objective: Weighted
    metrics: dict[str, Weighted]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Microbatch:
    """What one microbatch brings; of several, each array has a dim 0 of microbatches.

    Attributes:
        batch: the leaves of the batch.
        state: the changing leaves outside of the blocks, as they are before this microbatch.
    """

    batch: list[Array]
    state: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInputs:
    """What the blocks of one virtual stage are given.

    Attributes:
        weights: block by block, its trained leaves.
        fixed: block by block, its constant leaves.
        changing: block by block, the state it replaces.
        outer: the trained leaves outside of the blocks that blocks read.
        message: what the stage before has sent.
        microbatch: what the microbatch brings.
        virtual_stage: the number of the virtual stage.
    """

    weights: list[BlockRow]
    fixed: list[BlockRow]
    changing: list[BlockRow]
    outer: LeafValues
    message: Message
    microbatch: Microbatch
    virtual_stage: Array


class BlockOutputs(NamedTuple):
    """What the blocks of one virtual stage return: a message, and block by block its new state."""

    message: Message
    changing: list[BlockRow]


class EmbedFunction(Protocol):
    """From a microbatch to what the first virtual stage receives."""

    def __call__(self, outer: LeafValues, microbatch: Microbatch) -> Message:
        """Run it on the outer weights it reads."""
        ...


class BlocksFunction(Protocol):
    """The blocks of one virtual stage."""

    def __call__(self, inputs: BlockInputs) -> BlockOutputs:
        """Run them one after another."""
        ...


class HeadFunction(Protocol):
    """From what the last virtual stage sends to the losses of a microbatch."""

    def __call__(self, outer: LeafValues, message: Message, microbatch: Microbatch) -> Losses:
        """Run it on the outer weights it reads."""
        ...


@dataclass(frozen=True)
class StageFunctions:
    """A model cut into stages, as functions of one microbatch.

    Attributes:
        embed: what comes before the blocks.
        blocks: the blocks of one virtual stage.
        head: what comes after the blocks.
        embed_reads: step leaves of the outer weights that ``embed`` reads.
        blocks_read: those that ``blocks`` reads.
        head_reads: those that ``head`` reads.
    """

    embed: EmbedFunction
    blocks: BlocksFunction
    head: HeadFunction
    embed_reads: tuple[int, ...]
    blocks_read: tuple[int, ...]
    head_reads: tuple[int, ...]


@dataclass(frozen=True)
class StageValues:
    """What one stage holds while it works through a batch.

    Attributes:
        weights: trained leaves of its blocks, each [chunks × blocks, …].
        fixed: constant leaves of its blocks.
        changing: state of its blocks, which every forward pass replaces.
        outer: trained leaves outside of the blocks.
        microbatches: what the microbatches bring, each array [microbatches, …].
    """

    weights: BlockRow
    fixed: BlockRow
    changing: BlockRow
    outer: LeafValues
    microbatches: Microbatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageSums:
    """What a stage has added up.

    Attributes:
        weights: gradients of its blocks' leaves, each microbatch with its weight.
        outer: its share of the outer weights' gradients.
        losses: its share of totals and weights: all of it on the last stage.
        changing: the state of its blocks afterwards.
    """

    weights: BlockRow
    outer: LeafValues
    losses: Losses
    changing: BlockRow
