"""Cutting a traced loss at its repeated blocks: what comes before, the blocks, what comes after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.errors import Setting, UserError
from meshwright.pipeline.division import Division, divide_blocks
from meshwright.pipeline.slicing import inputs_of, needed, only_for
from meshwright.program.jaxprs import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    scan_counts,
)
from meshwright.program.rolled import casts_of
from meshwright.program.trace import TracedLoss

_BLOCKS = re.compile(r"([^.]+\.)*?[^.]*(\*|\d+n(\+\d+)?)(?=\.|$)")
"""The path of blocks within that of a stack."""

_FSDP, _TENSOR = Setting("mesh.fsdp"), Setting("mesh.tensor")

BY_HAND = "give the stages yourself: mw.pipeline.Pipeline(stages=[…])"


@dataclass(frozen=True)
class BlockCut:
    """A traced loss with its blocks told apart from the rest.

    Attributes:
        traced: the loss, its blocks rolled into a scan.
        position: number of that scan among the program's equations.
    """

    traced: TracedLoss
    position: int

    @property
    def jaxpr(self) -> Jaxpr:
        """The program."""
        return self.traced.closed.jaxpr

    @property
    def eqn(self) -> Equation:
        """The scan over the blocks."""
        return self.jaxpr.eqns[self.position]

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return self.eqn.params["length"]

    @property
    def name(self) -> str:
        """What the blocks are called: ``blocks.*``, ``layers.2n`` for pairs; empty if unknown."""
        paths = [self.traced.layout.step_leaves[n].leaf.path for n in self.stacks]
        found = (_BLOCKS.match(path) for path in paths)
        return next((match[0] for match in found if match), "")

    @cached_property
    def numbers(self) -> list[tuple[int, ...]]:
        """By block, the numbers of its modules in the model; several where kinds take turns."""
        layout, found = self.traced.layout, [set[int]() for _ in range(self.num_blocks)]
        for step in (layout.step_leaves[n] for n in self.stacks):
            paths = [layout.leaves[source].path.split(".") for source in step.sources]
            parts = next((own for own in zip(*paths, strict=True) if len(set(own)) > 1), ())
            for own, part in zip(found, parts, strict=False):
                own.update(int(number) for number in re.findall(r"\d+$", part))
        return [tuple(sorted(own)) or (n,) for n, own in enumerate(found)]

    @cached_property
    def odd_blocks(self) -> list[str]:
        """The paths of modules in the blocks' own list that are no such blocks."""
        head = re.sub(r"(\*|\d+n(\+\d+)?)$", "", self.name)
        if not head:
            return []
        pattern = re.compile(rf"{re.escape(head)}\d+(?=\.)")
        paths = [self.traced.layout.step_leaves[n].leaf.path for n in self.outer]
        found = (pattern.match(path) for path in paths)
        return list(dict.fromkeys(match[0] for match in found if match))

    @property
    def constants(self) -> list[Any]:
        """What every block reads."""
        return list(self.eqn.invars[: scan_counts(self.eqn)[0]])

    @property
    def initial(self) -> list[Any]:
        """What the first block receives."""
        num_consts, num_carry = scan_counts(self.eqn)
        return list(self.eqn.invars[num_consts : num_consts + num_carry])

    @property
    def layered(self) -> list[Any]:
        """What each block has a row of."""
        return list(self.eqn.invars[sum(scan_counts(self.eqn)) :])

    @property
    def received(self) -> list[Var]:
        """What the last block gives."""
        return list(self.eqn.outvars[: scan_counts(self.eqn)[1]])

    @cached_property
    def stack_of(self) -> dict[int, int]:
        """By number in `layered`, the step leaf it is a row of; others are computed before."""
        return stacks_of(self.traced, self.eqn)

    @cached_property
    def stacks(self) -> list[int]:
        """Numbers of the step leaves that hold the blocks."""
        return sorted(set(self.stack_of.values()))

    @cached_property
    def outer(self) -> list[int]:
        """Numbers of the other step leaves."""
        count = len(self.traced.layout.step_leaves)
        return [n for n in range(count) if n not in set(self.stacks)]

    @cached_property
    def around(self) -> list[Equation]:
        """The equations before and after the blocks."""
        eqns = self.jaxpr.eqns
        return [*eqns[: self.position], *eqns[self.position + 1 :]]

    @cached_property
    def shared(self) -> list[Any]:
        """What every stage computes for itself, since blocks of all of them read it."""
        computed = [atom for n, atom in enumerate(self.layered) if n not in self.stack_of]
        return [*self.constants, *computed]

    @cached_property
    def losses(self) -> list[Any]:
        """Totals and weights the program gives."""
        return list(self.jaxpr.outvars[: 2 * (1 + len(self.traced.metric_names))])

    @cached_property
    def states(self) -> dict[int, Any]:
        """By step leaf with role state, what it is afterwards."""
        steps = enumerate(self.traced.layout.step_leaves)
        numbers = [n for n, step in steps if step.leaf.role == "state"]
        return dict(zip(numbers, self.jaxpr.outvars[len(self.losses) :], strict=True))

    @cached_property
    def changing(self) -> dict[int, int]:
        """By step leaf that blocks replace, the number of the per-block result it becomes."""
        _, num_carry = scan_counts(self.eqn)
        results = {v: n for n, v in enumerate(self.eqn.outvars[num_carry:])}
        found: dict[int, int] = {}
        for number in self.stacks:
            after = self.states.get(number)
            if after is None or after is self.jaxpr.invars[number]:
                continue
            if isinstance(after, Literal) or after not in results:
                path = self.traced.layout.step_leaves[number].leaf.path
                raise _cannot_cut(f"`{path}` is changed outside of the blocks", self.traced)
            found[number] = results[after]
        return found

    @cached_property
    def collected(self) -> list[int]:
        """Numbers of the scan's per-block results that are read after the blocks."""
        _, num_carry = scan_counts(self.eqn)
        read = inputs_of(self.around, self.losses)
        return [n for n, v in enumerate(self.eqn.outvars[num_carry:]) if v in read]

    @cached_property
    def changed_outer(self) -> list[int]:
        """Numbers of the state leaves outside of the blocks that the program changes."""
        pairs = ((n, self.states[n]) for n in self.outer if n in self.states)
        return [n for n, after in pairs if after is not self.jaxpr.invars[n]]

    @cached_property
    def next_state(self) -> tuple[ClosedJaxpr, list[int]]:
        """How `changed_outer` follows from the state before, as a program and what it reads.

        Microbatches overlap in a pipeline: the next one starts before this one has ended, so its
        state must not depend on this one's activations.
        """
        if not self.changed_outer:
            return self.traced.closed, []
        first, order = len(self.losses), list(self.states)
        outputs = [first + order.index(number) for number in self.changed_outer]
        program, reads = only_for(self.traced.closed, outputs)
        known = {n for n in self.outer if n in self.states}
        if not known.issuperset(reads):
            reads_of = {
                number: only_for(self.traced.closed, [output])[1]
                for number, output in zip(self.changed_outer, outputs, strict=True)
            }
            seen = [number for number, own in reads_of.items() if not known.issuperset(own)]
            paths = [self.traced.layout.step_leaves[n].leaf.path for n in seen]
            raise _cannot_cut(
                f"{', '.join(paths)} outside of the blocks depends on the samples seen", self.traced
            )
        return program, reads

    def reads(self, wanted: Sequence[Any]) -> tuple[list[Equation], list[int]]:
        """Return the equations around the blocks that values need, and the leaves they read."""
        eqns = needed(self.around, wanted)
        found = inputs_of(eqns, wanted)
        leaves = self.jaxpr.invars[: len(self.traced.layout.step_leaves)]
        return eqns, [n for n, v in enumerate(leaves) if v in found]

    def check(self) -> None:
        """Refuse what cannot be cut, by name."""
        for wanted in (self.initial, self.shared, self.losses):
            _, leaves = self.reads(wanted)
            both = [n for n in leaves if n in set(self.stacks)]
            if both:
                path = self.traced.layout.step_leaves[both[0]].leaf.path
                raise _cannot_cut(f"`{path}` is read outside of the blocks too", self.traced)
        # Found out here, where the user is told, rather than while the step is traced.
        _ = self.changing, self.next_state


def cut_blocks(traced: TracedLoss, remarks: Sequence[str] = ()) -> BlockCut:
    """Find the list of blocks that holds most of the model, and cut there.

    Args:
        traced: the loss, repeated blocks rolled into scans.
        remarks: why other lists of blocks could not be rolled.
    """
    weights: dict[int, int] = {}
    for number, eqn in enumerate(traced.closed.jaxpr.eqns):
        if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
            leaves = {traced.layout.step_leaves[n].leaf for n in stacks_of(traced, eqn).values()}
            size = sum(leaf.size for leaf in leaves if leaf.is_weight)
            if size:
                weights[number] = size
    if not weights:
        raise UserError(
            "the model has no repeated blocks to divide into pipeline stages",
            why="; ".join(remarks) or "no list of equal modules runs one after another",
            fix=f"use {_FSDP} or {_TENSOR} for these devices, or {BY_HAND}",
        )
    found = BlockCut(traced, max(weights, key=lambda number: weights[number]))
    found.check()
    return found


def ordered_by_stage(cut: BlockCut, num_stages: int, num_chunks: int) -> BlockCut:
    """Return the cut with each stack's rows as stages hold them: in their order, filled up."""
    division = divide_blocks(cut.num_blocks, num_stages, num_chunks, name=cut.name)
    rows = division.rows()
    if rows == tuple(range(cut.num_blocks)):
        return cut
    steps = list(cut.traced.layout.step_leaves)
    for number in cut.stacks:
        if not steps[number].stacked:
            raise _one_array(steps[number].leaf.path, division)
        steps[number] = steps[number].in_rows(rows)
    layout = replace(cut.traced.layout, step_leaves=tuple(steps))
    return BlockCut(replace(cut.traced, layout=layout), cut.position)


def _one_array(path: str, division: Division) -> UserError:
    stages, count = division.num_stages, sum(division.counts)
    if not division.even:
        below = count // len(division.counts) * len(division.counts)
        return UserError(
            f"`{path}` is one array for all {count} blocks, which {stages} stages cannot share",
            why=f"they would hold {', '.join(map(str, division.counts))} of its rows",
            fix=f"use a model with {below} or {below + len(division.counts)} blocks, or a list of "
            "modules, one for each block",
        )
    return UserError(
        f"`{path}` is one array for all blocks, which chunks would reorder",
        why=f"stages with {division.num_chunks} chunks hold rows that do not follow each other",
        fix=f"write {Setting('pipeline.schedule', '1f1b', 'zb_h1')}",
    )


def stacks_of(traced: TracedLoss, eqn: Equation) -> dict[int, int]:
    """By number among a scan's rows, the step leaf that is its stack."""
    jaxpr = traced.closed.jaxpr
    leaves = {v: n for n, v in enumerate(jaxpr.invars[: len(traced.layout.step_leaves)])}
    casts = casts_of(jaxpr.eqns, set(leaves))
    rows = eqn.invars[sum(scan_counts(eqn)) :]
    found: dict[int, int] = {}
    for number, atom in enumerate(rows):
        source = atom if isinstance(atom, Literal) else casts.get(atom, atom)
        if not isinstance(source, Literal) and source in leaves:
            found[number] = leaves[source]
    return found


def _cannot_cut(what: str, traced: TracedLoss) -> UserError:
    count = traced.batch[0].shape[0]
    return UserError(
        f"the model cannot be divided into pipeline stages: {what}",
        why=f"several microbatches of {count} samples pass through the stages at the same time",
        fix=f"use {_FSDP} or {_TENSOR} instead, or {BY_HAND}",
    )
