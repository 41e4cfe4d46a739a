"""Layout: converting the model's leaves (canonical paths) to the leaves of a step, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from meshwright.program.trace.model_leaves import Leaf, Role


@dataclass(frozen=True)
class StepLeaf:
    """A leaf the step runs on: one leaf of the model, or several stacked.

    Attributes:
        leaf: its description; a stacked leaf's path has ``*`` for the block's number, and its
            shape starts with the number of blocks.
        sources: positions of the model's leaves it holds, in order.
        rows: for a stack in another order than `sources`: by row, the index in `sources` of the
            leaf in it; later occurrences of an index are padding.
    """

    leaf: Leaf
    sources: tuple[int, ...]
    rows: tuple[int, ...] = ()

    @property
    def stacked(self) -> bool:
        """Whether it holds several leaves of the model."""
        return len(self.sources) > 1

    @property
    def source_rows(self) -> list[int]:
        """For a stack, the row of each of the model's leaves, in the order of `sources`."""
        numbers = range(len(self.sources))
        return [self.rows.index(n) for n in numbers] if self.rows else list(numbers)

    def with_rows(self, rows: tuple[int, ...]) -> StepLeaf:
        """Return this stack with its rows in another order, perhaps padded."""
        leaf = replace(self.leaf, shape=(len(rows), *self.leaf.shape[1:]))
        return replace(self, leaf=leaf, rows=rows)

    def split(self, value: Any) -> list[Any]:
        """Return the model's leaves this leaf holds, in the order of `sources`."""
        return [value[row] for row in self.source_rows] if self.stacked else [value]

    def join(self, values: Sequence[Any]) -> Any:
        """Return this leaf, made of the model's leaves it holds; the inverse of `split`."""
        if not self.stacked:
            return values[0]
        return jnp.stack([values[n] for n in self.rows] if self.rows else list(values))


@dataclass(frozen=True)
class Layout:
    """The model's leaves, and the leaves that the step runs on, parameters and state."""

    leaves: tuple[Leaf, ...]
    step_leaves: tuple[StepLeaf, ...]

    def from_canonical(self, values: Sequence[Any]) -> list[Any]:
        """Convert the model's leaf values to the step's leaves."""
        return [step.join([values[i] for i in step.sources]) for step in self.step_leaves]

    def to_canonical(self, values: Sequence[Any]) -> list[Any]:
        """Convert the step's leaves to the model's leaf values."""
        by_position: dict[int, Any] = {}
        for step, value in zip(self.step_leaves, values, strict=True):
            by_position.update(zip(step.sources, step.split(value), strict=True))
        return [by_position[i] for i in range(len(self.leaves))]

    def numbers(self, role: Role) -> list[int]:
        """Return the numbers of the step's leaves with this role."""
        return [n for n, step in enumerate(self.step_leaves) if step.leaf.role == role]

    def select(self, role: Role) -> list[StepLeaf]:
        """Return the step's leaves with this role."""
        return [self.step_leaves[number] for number in self.numbers(role)]


def stacked_layout(leaves: Sequence[Leaf], groups: Mapping[tuple[int, ...], str]) -> Layout:
    """Return the layout in which each group of leaves is stacked into one, which has this path.

    The step runs on the other leaves as they are.
    """
    grouped = {i for group in groups for i in group}
    steps = [StepLeaf(leaf, (i,)) for i, leaf in enumerate(leaves) if i not in grouped]
    steps += [StepLeaf(_stack(leaves[g[0]], len(g), path), g) for g, path in groups.items()]
    return Layout(tuple(leaves), tuple(steps))


def _stack(leaf: Leaf, count: int, path: str) -> Leaf:
    annotation = (None, *leaf.annotation) if leaf.annotation else None
    return replace(leaf, path=path, shape=(count, *leaf.shape), annotation=annotation)
