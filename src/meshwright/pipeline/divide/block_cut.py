"""A traced loss cut at its blocks: the scan over them, the leaves inside and outside, and names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshwright.program.jaxpr.equations import Atom, ClosedJaxpr, Equation, Jaxpr, Var, scan_counts
from meshwright.program.trace.layout import StepLeaf
from meshwright.program.trace.traced_loss import TracedLoss

LeafKind = Literal["weight", "fixed", "changing"]
"""Whether a leaf is trained, constant, or replaced by every forward pass."""


@dataclass(frozen=True)
class BlockScan:
    """The scan over the blocks: what all of them read, the carry, and what has a row per block."""

    eqn: Equation
    constants: tuple[Atom, ...]
    initial: tuple[Atom, ...]
    layered: tuple[Atom, ...]
    final: tuple[Var, ...]
    results: tuple[Var, ...]

    @classmethod
    def of(cls, eqn: Equation) -> BlockScan:
        """Read a scan equation."""
        num_consts, num_carry = scan_counts(eqn)
        inputs, outputs = tuple(eqn.invars), tuple(eqn.outvars)
        return cls(
            eqn,
            constants=inputs[:num_consts],
            initial=inputs[num_consts : num_consts + num_carry],
            layered=inputs[num_consts + num_carry :],
            final=outputs[:num_carry],
            results=outputs[num_carry:],
        )

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return self.eqn.params["length"]

    @property
    def body(self) -> Jaxpr:
        """The program of one block."""
        return self.eqn.params["jaxpr"].jaxpr


@dataclass(frozen=True)
class CutLeaf:
    """A step leaf: outside the blocks, or with one row for each block.

    ``result`` is the position of the scan's result that replaces a changing one of the blocks.
    """

    number: int
    variable: Var
    step: StepLeaf
    kind: LeafKind
    result: int | None = None

    @property
    def path(self) -> str:
        """Its path in the model."""
        return self.step.leaf.path


@dataclass(frozen=True)
class StackedInput:
    """A layered input of the scan, by its position, that is a step leaf or the cast of one."""

    position: int
    atom: Var
    stack: CutLeaf


@dataclass(frozen=True)
class Region:
    """A part of the program outside the blocks, and the step leaves that it reads there."""

    outputs: tuple[Atom, ...]
    eqns: tuple[Equation, ...]
    reads: tuple[CutLeaf, ...]

    @property
    def weights(self) -> list[CutLeaf]:
        """The trained leaves among those it reads."""
        return [leaf for leaf in self.reads if leaf.kind == "weight"]


@dataclass(frozen=True)
class NextState:
    """The program of the changing leaves outside the blocks, and the step leaves it reads."""

    program: ClosedJaxpr
    reads: tuple[int, ...]


@dataclass(frozen=True)
class BlockCut:
    """A traced loss, its blocks separated from the rest.

    ``position`` is the number of the scan among the equations. ``stacks`` are the step leaves that
    hold the blocks, ``stacked`` the inputs of the scan that are such leaves, ``outer`` the other
    step leaves, and ``collected`` the positions of the scan's results that are read after the
    blocks. Every stage computes what is ``shared`` by itself.
    """

    traced: TracedLoss
    position: int
    scan: BlockScan
    stacks: tuple[CutLeaf, ...]
    stacked: tuple[StackedInput, ...]
    outer: tuple[CutLeaf, ...]
    collected: tuple[int, ...]
    embedding: Region
    shared: Region
    head: Region
    next_state: NextState | None

    @property
    def jaxpr(self) -> Jaxpr:
        """The whole program."""
        return self.traced.closed.jaxpr

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return self.scan.num_blocks

    @cached_property
    def computed(self) -> dict[int, Atom]:
        """The layered inputs of the scan that are computed before the blocks, by position."""
        stacked = {row.position for row in self.stacked}
        return {n: atom for n, atom in enumerate(self.scan.layered) if n not in stacked}

    def inputs_of(self, kind: LeafKind) -> list[StackedInput]:
        """Return the layered inputs whose stacks are of a kind."""
        return [row for row in self.stacked if row.stack.kind == kind]

    def outer_of(self, kind: LeafKind) -> list[CutLeaf]:
        """Return the leaves outside the blocks that are of a kind."""
        return [leaf for leaf in self.outer if leaf.kind == kind]


_BLOCKS = re.compile(r"([^.]+\.)*?[^.]*(\*|\d+n(\+\d+)?)(?=\.|$)")
"""The path of blocks within that of a stack."""


def path_of_blocks(stacks: Sequence[CutLeaf]) -> str:
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
    """Return the paths of modules in the list of blocks that differ from the repeated ones."""
    head = re.sub(r"(\*|\d+n(\+\d+)?)$", "", path_of_blocks(cut.stacks))
    if not head:
        return []
    pattern = re.compile(rf"{re.escape(head)}\d+(?=\.)")
    # Leaves that no block reads, such as the random keys of a dropout of 0, do not count.
    weights = (leaf for leaf in cut.outer if leaf.kind == "weight")
    matches = (pattern.match(leaf.step.leaf.path) for leaf in weights)
    return list(dict.fromkeys(match[0] for match in matches if match))
