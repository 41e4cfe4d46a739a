"""The names of blocks in the model: path, numbers, and modules that differ from them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.pipeline.divide.block_cut import BlockCut, BlockStack

_BLOCKS = re.compile(r"([^.]+\.)*?[^.]*(\*|\d+n(\+\d+)?)(?=\.|$)")
"""The path of blocks within that of a stack."""


def path_of_blocks(stacks: Sequence[BlockStack]) -> str:
    """Return the path of blocks: ``blocks.*``, ``layers.2n`` for pairs; empty if unknown."""
    matches = (_BLOCKS.match(stack.path) for stack in stacks)
    return next((match[0] for match in matches if match), "")


def modules_of_blocks(cut: BlockCut) -> list[tuple[int, ...]]:
    """Return, by block, the numbers of its modules in the model; several where kinds alternate."""
    leaves = cut.traced.layout.leaves
    numbers = [set[int]() for _ in range(cut.num_blocks)]
    for stack in cut.stacks:
        paths = [leaves[source].path.split(".") for source in stack.step.sources]
        varying = next((parts for parts in zip(*paths, strict=True) if len(set(parts)) > 1), ())
        for block_numbers, part in zip(numbers, varying, strict=False):
            block_numbers.update(int(number) for number in re.findall(r"\d+$", part))
    return [tuple(sorted(modules)) or (block,) for block, modules in enumerate(numbers)]


def odd_modules(cut: BlockCut) -> list[str]:
    """Return the paths of modules in the blocks' own list that are not such blocks."""
    head = re.sub(r"(\*|\d+n(\+\d+)?)$", "", path_of_blocks(cut.stacks))
    if not head:
        return []
    pattern = re.compile(rf"{re.escape(head)}\d+(?=\.)")
    # What no block reads, such as the random keys of a dropout of 0, says nothing about it.
    weights = (leaf for leaf in cut.outer if leaf.kind == "weight")
    matches = (pattern.match(leaf.step.leaf.path) for leaf in weights)
    return list(dict.fromkeys(match[0] for match in matches if match))
