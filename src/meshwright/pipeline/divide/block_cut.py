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
    """The scan over the blocks.

    Attributes:
        eqn: the scan equation.
        constants: inputs that every block reads.
        initial: the initial carry, which the first block receives.
        layered: inputs with one row per block.
        final: the final carry, which the last block returns.
        results: outputs with one row per block.
    """

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

    Attributes:
        number: number of the step leaf.
        variable: its variable in the program.
        step: the step leaf.
        kind: whether it is trained, constant, or replaced by every forward pass.
        result: for a changing one of the blocks, the position of the scan's result that replaces
            it.
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
    """A layered input of the scan that is a step leaf, or the cast of one.

    Attributes:
        position: its position among the scan's layered inputs.
        atom: the variable that the scan reads.
        stack: the step leaf.
    """

    position: int
    atom: Var
    stack: CutLeaf


@dataclass(frozen=True)
class Region:
    """A part of the program outside the blocks.

    Attributes:
        outputs: its outputs.
        eqns: its equations.
        reads: the step leaves outside the blocks that it reads.
    """

    outputs: tuple[Atom, ...]
    eqns: tuple[Equation, ...]
    reads: tuple[CutLeaf, ...]

    @property
    def weights(self) -> list[CutLeaf]:
        """The trained leaves among those it reads."""
        return [leaf for leaf in self.reads if leaf.kind == "weight"]


@dataclass(frozen=True)
class NextState:
    """The program that updates the state outside the blocks.

    Attributes:
        program: computes the changing leaves, in order.
        reads: numbers of the step leaves that are its arguments.
    """

    program: ClosedJaxpr
    reads: tuple[int, ...]


@dataclass(frozen=True)
class BlockCut:
    """A traced loss, its blocks separated from the rest.

    Attributes:
        traced: the loss, its blocks rolled into a scan.
        position: number of that scan among the program's equations.
        scan: the scan over the blocks.
        stacks: the step leaves that hold the blocks, by number.
        stacked: the inputs of the scan that are such leaves, in the scan's order.
        outer: the other step leaves, by number.
        collected: positions of the scan's results that are read after the blocks.
        embedding: from the batch to the input of the first block.
        shared: values that blocks of every stage read; every stage computes them itself.
        head: from the output of the last block to totals and weights.
        next_state: computes the next values of the changing leaves of `outer`; None without any.
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
