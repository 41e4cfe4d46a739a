"""Records of the inputs and outputs of a stage's forward and backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax import Array

from meshwright.pipeline.divide.stages import BlockRow, LeafValues, Losses
from meshwright.pipeline.execute.slots import is_float
from meshwright.trees import PyTree, TreeDef


@dataclass(frozen=True)
class MessageSplit:
    """Splits messages of one structure into leaves with and without a gradient."""

    has_gradient: tuple[bool, ...]
    tree: TreeDef

    @classmethod
    def of(cls, message: PyTree, *, differentiable: bool = True) -> MessageSplit:
        """Return the split of messages like this one; none has gradients unless differentiable."""
        leaves, tree = jax.tree.flatten(message)
        return cls(tuple(differentiable and is_float(leaf) for leaf in leaves), tree)

    def split(self, message: PyTree) -> tuple[list[Array], list[Array]]:
        """Return the leaves with a gradient, and the others."""
        pairs = list(zip(jax.tree.leaves(message), self.has_gradient, strict=True))
        return [leaf for leaf, has in pairs if has], [leaf for leaf, has in pairs if not has]

    def join(self, floats: Sequence[Array], others: Sequence[Array]) -> PyTree:
        """Return the message with these leaves; the inverse of `split`."""
        first, second = iter(floats), iter(others)
        leaves = [next(first if has else second) for has in self.has_gradient]
        return jax.tree.unflatten(self.tree, leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardMessage:
    """Gradients for the previous stage, or values from an input gradient for its weight gradient.

    Gradients of weights are multiplied by ``weight`` at the end; None if they include it already,
    as they do unless the loss is scaled.
    """

    values: list[Array]
    weight: Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeights:
    """What the blocks of a chunk read: weights, their gradients, or sums of these [chunks, …]."""

    rows: list[BlockRow]
    outer: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadGradient:
    """The losses of a microbatch, gradients of the head's weights, and of its input; or their sums.

    To sums belong the slots of the gradients that wait.
    """

    losses: Losses
    outer: LeafValues
    back: BackwardMessage
