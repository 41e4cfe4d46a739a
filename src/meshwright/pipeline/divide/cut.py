"""Cutting a traced loss at its repeated blocks into embedding, blocks and head."""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.errors import Setting, UserError
from meshwright.pipeline.divide.block_cut import (
    BlockCut,
    BlockScan,
    CutLeaf,
    NextState,
    Region,
    StackedInput,
    path_of_blocks,
)
from meshwright.pipeline.divide.division import Division, divide_blocks
from meshwright.program.blocks.differences import describe_operation, user_of
from meshwright.program.blocks.to_scan import casts_of
from meshwright.program.evaluate.dependencies import inputs_of, needed_equations, select_outputs
from meshwright.program.jaxpr.equations import Atom, Equation, Literal
from meshwright.program.trace.traced_loss import TracedLoss

_FSDP, _TENSOR = Setting("mesh.fsdp"), Setting("mesh.tensor")

BY_HAND = (
    "define the stages yourself: mw.pipeline.Pipeline(stages=[…]), whose layers, NNX or Linen, may "
    "differ"
)


def cut_blocks(traced: TracedLoss, remarks: Sequence[str] = ()) -> BlockCut:
    """Cut at the blocks that hold most of the model; ``remarks`` say why others are not rolled."""
    sizes: dict[int, int] = {}
    for position, eqn in enumerate(traced.closed.jaxpr.eqns):
        if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
            stacks = _stacks_by_position(traced, BlockScan.of(eqn)).values()
            leaves = {traced.layout.step_leaves[number].leaf for number in stacks}
            size = sum(leaf.size for leaf in leaves if leaf.is_weight)
            if size:
                sizes[position] = size
    if not sizes:
        raise UserError(
            "the model has no repeated blocks to divide into pipeline stages",
            why="; ".join(remarks) or "no list of equal modules runs one after another",
            fix=f"use {_FSDP} or {_TENSOR} for these devices, or {BY_HAND}",
        )
    return _Cutter(traced, max(sizes, key=lambda position: sizes[position])).cut()


def ordered_by_stage(cut: BlockCut, num_stages: int, num_chunks: int) -> BlockCut:
    """Return the cut with each stack's rows in the order of stages, padded to equal numbers."""
    path = path_of_blocks(cut.stacks)
    division = divide_blocks(cut.num_blocks, num_stages, num_chunks, name=path)
    rows = division.rows()
    if rows == tuple(range(cut.num_blocks)):
        return cut
    steps = list(cut.traced.layout.step_leaves)
    for stack in cut.stacks:
        if not stack.step.stacked:
            raise _one_array(stack.path, division)
        steps[stack.number] = stack.step.with_rows(rows)
    layout = replace(cut.traced.layout, step_leaves=tuple(steps))
    return _Cutter(replace(cut.traced, layout=layout), cut.position).cut()


class _Cutter:
    """Separates the blocks from the rest of the program; raises if that is not possible."""

    def __init__(self, traced: TracedLoss, position: int) -> None:
        self.traced, self.position = traced, position
        self.jaxpr, self.steps = traced.closed.jaxpr, traced.layout.step_leaves
        eqns = self.jaxpr.eqns
        self.scan = BlockScan.of(eqns[position])
        self.around = [*eqns[:position], *eqns[position + 1 :]]
        self.losses = self.jaxpr.outvars[: traced.num_results]
        states = traced.layout.numbers("state")
        after = self.jaxpr.outvars[len(self.losses) :]
        # For each step leaf with role state, its value after the microbatch.
        self.next_values = dict(zip(states, after, strict=True))
        self.stack_of = _stacks_by_position(traced, self.scan)

    def cut(self) -> BlockCut:
        """Return the cut."""
        stacked = set(self.stack_of.values())
        outer = tuple(self.leaf(n) for n in range(len(self.steps)) if n not in stacked)
        layered = list(enumerate(self.scan.layered))
        computed = [atom for position, atom in layered if position not in self.stack_of]
        embedding, shared, head = (
            self.region(wanted, outer)
            for wanted in (self.scan.initial, [*self.scan.constants, *computed], self.losses)
        )
        stacks = {number: self.stack(number) for number in sorted(stacked)}
        return BlockCut(
            self.traced,
            self.position,
            self.scan,
            stacks=tuple(stacks.values()),
            stacked=tuple(
                StackedInput(position, atom, stacks[self.stack_of[position]])
                for position, atom in layered
                if position in self.stack_of and not isinstance(atom, Literal)
            ),
            outer=outer,
            collected=self.collected(),
            embedding=embedding,
            shared=shared,
            head=head,
            next_state=self.next_state(outer),
        )

    def leaf(self, number: int) -> CutLeaf:
        step, variable = self.steps[number], self.jaxpr.invars[number]
        if step.leaf.role == "param":
            return CutLeaf(number, variable, step, "weight")
        changes = self.next_values[number] is not variable
        return CutLeaf(number, variable, step, "changing" if changes else "fixed")

    def region(self, wanted: Sequence[Atom], outer: Sequence[CutLeaf]) -> Region:
        """Return the region that computes these values; it must not read leaves of the blocks."""
        eqns = needed_equations(self.around, wanted)
        read = inputs_of(eqns, wanted)
        for number in sorted(set(self.stack_of.values())):
            if self.jaxpr.invars[number] in read:
                raise self.read_outside(number, eqns)
        return Region(
            tuple(wanted), tuple(eqns), tuple(leaf for leaf in outer if leaf.variable in read)
        )

    def read_outside(self, number: int, eqns: Sequence[Equation]) -> UserError:
        leaf = self.steps[number].leaf
        reader = user_of(eqns, self.jaxpr.invars[number])
        where = f", by {describe_operation(reader)}" if reader else ""
        what = f"`{leaf.path}` {list(leaf.shape)} is also read outside the blocks{where}"
        return _cannot_cut(what, self.traced)

    def stack(self, number: int) -> CutLeaf:
        leaf = self.leaf(number)
        if leaf.kind != "changing":
            return leaf
        after = self.next_values[number]
        if isinstance(after, Literal) or after not in self.scan.results:
            raise _cannot_cut(f"`{leaf.path}` is changed outside the blocks", self.traced)
        return replace(leaf, result=self.scan.results.index(after))

    def collected(self) -> tuple[int, ...]:
        read = inputs_of(self.around, self.losses)
        return tuple(n for n, result in enumerate(self.scan.results) if result in read)

    def next_state(self, outer: Sequence[CutLeaf]) -> NextState | None:
        """Return the program that updates the state outside the blocks.

        Microbatches overlap in a pipeline: the next one starts before this one ends, so its state
        must not depend on the activations of this one.
        """
        changing = [leaf for leaf in outer if leaf.kind == "changing"]
        if not changing:
            return None
        order = list(self.next_values)
        outputs = [len(self.losses) + order.index(leaf.number) for leaf in changing]
        program, reads = select_outputs(self.traced.closed, outputs)
        known = {leaf.number for leaf in outer if leaf.kind != "weight"}
        if not known.issuperset(reads):
            reads_of = [select_outputs(self.traced.closed, [output])[1] for output in outputs]
            paths = [
                leaf.step.leaf.path
                for leaf, leaf_reads in zip(changing, reads_of, strict=True)
                if not known.issuperset(leaf_reads)
            ]
            raise _cannot_cut(
                f"{', '.join(paths)} outside the blocks depends on the samples", self.traced
            )
        return NextState(program, tuple(reads))


def _stacks_by_position(traced: TracedLoss, scan: BlockScan) -> dict[int, int]:
    """Return the step leaf number of each layered input that is a step leaf or the cast of one."""
    jaxpr = traced.closed.jaxpr
    leaves = {v: n for n, v in enumerate(jaxpr.invars[: len(traced.layout.step_leaves)])}
    casts = casts_of(jaxpr.eqns, set(leaves))
    stacks: dict[int, int] = {}
    for position, atom in enumerate(scan.layered):
        source = atom if isinstance(atom, Literal) else casts.get(atom, atom)
        if not isinstance(source, Literal) and source in leaves:
            stacks[position] = leaves[source]
    return stacks


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


def _cannot_cut(what: str, traced: TracedLoss) -> UserError:
    count = traced.batch[0].shape[0]
    return UserError(
        f"the model cannot be divided into pipeline stages: {what}",
        why=f"several microbatches of {count} samples pass through the stages at the same time",
        fix=f"use {_FSDP} or {_TENSOR} instead, or {BY_HAND}",
    )
