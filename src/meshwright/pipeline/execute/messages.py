"""Messages between stages, split into leaves with and without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from meshwright.pipeline.aliases import Array, TreeDef
from meshwright.pipeline.execute.slots import is_float
from meshwright.trees import PyTree


@dataclass(frozen=True)
class MessageSplit:
    """Splits messages of one structure into leaves with and without a gradient.

    Attributes:
        has_gradient: by leaf, whether it has a gradient.
        tree: the structure of the message.
    """

    has_gradient: tuple[bool, ...]
    tree: TreeDef

    @classmethod
    def of(cls, message: PyTree, *, differentiable: bool = True) -> MessageSplit:
        """Return the split of messages like this one, given as arrays or shapes.

        Args:
            message: an example.
            differentiable: whether floats have a gradient; the input of a model has none.
        """
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
