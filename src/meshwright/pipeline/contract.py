"""What the executor works on: a model cut into functions, what a stage holds and adds up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from meshwright.weighted import Weighted

Message = list[Any]
"""What one stage hands to the next."""


class Losses(NamedTuple):
    """Totals and weights of what is minimised, and of what is reported."""

    objective: Weighted
    metrics: dict[str, Weighted]


@dataclass(frozen=True)
class StageFunctions:
    """A model cut into stages, as functions of one microbatch.

    Blocks are given as rows: for each block of a virtual stage, its leaves.

    Attributes:
        embed: from (outer weights, inputs) to what the first virtual stage receives.
        blocks: from (rows, fixed rows, outer weights, message, changing rows, inputs, number of the
            virtual stage) to (message, changing rows).
        head: from (outer weights, message, inputs) to the losses.
        embed_reads: numbers of the outer weights ``embed`` is given, in order.
        blocks_read: those of ``blocks``.
        head_reads: those of ``head``.
    """

    embed: Callable[[list[Any], Any], Message]
    blocks: Callable[..., tuple[Message, list[list[Any]]]]
    head: Callable[[list[Any], Message, Any], Losses]
    embed_reads: Sequence[int]
    blocks_read: Sequence[int]
    head_reads: Sequence[int]


@dataclass(frozen=True)
class StageValues:
    """What one stage holds while it works through a batch.

    Attributes:
        weights: trained leaves of its blocks, each [chunks × blocks, …].
        fixed: leaves of its blocks that nothing changes.
        changing: state of its blocks, which every forward pass replaces.
        outer: trained leaves outside of the blocks.
        inputs: a pytree of what each microbatch brings, each [microbatches, …].
    """

    weights: list[Any]
    fixed: list[Any]
    changing: list[Any]
    outer: list[Any]
    inputs: Any


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

    weights: list[Any]
    outer: list[Any]
    losses: Losses
    changing: list[Any]
