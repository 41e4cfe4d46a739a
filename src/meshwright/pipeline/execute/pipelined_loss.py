"""Loss and gradients of a batch, its microbatches overlapping in a pipeline of stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.mesh.axes import PIPE, entry_names
from meshwright.pipeline.divide.block_cut import BlockCut
from meshwright.pipeline.divide.division import divide_blocks
from meshwright.pipeline.divide.stages import (
    LeafValues,
    Losses,
    Microbatch,
    StageContext,
    Stages,
    StageSums,
)
from meshwright.pipeline.execute.executor import StageExecutor
from meshwright.pipeline.execute.tick_rows import SlotCounts, TickRow, table_rows
from meshwright.pipeline.schedule.operations import Shape
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.evaluate.widen import wide_evaluator
from meshwright.sharding.placement import Placement


@dataclass(frozen=True)
class PipelineSums:
    """Losses and gradients of a batch, each microbatch's times its weight (and the loss scale)."""

    gradients: list[Array]
    losses: Losses
    state: list[Array]


_StageResults = tuple[LeafValues, LeafValues, Losses, LeafValues]
"""Gradients of the stacks, the outer weights' sums on each device, losses, and new block state."""


@dataclass(eq=False)
class PipelinedLoss:
    """A loss and its gradients, computed by stages that work on different microbatches.

    ``sums`` and ``gradients`` are, by number of the step leaf, the layout of a gradient's sum on
    one stage and its placement afterwards. ``per_device`` is the same loss for the samples of one
    device, if each device sums its gradients until the end of the step.
    """

    cut: BlockCut
    where: StageContext
    schedule: Schedule
    num_microbatches: int
    sums: Sequence[PartitionSpec]
    gradients: Sequence[Placement]
    per_device: BlockCut | None = None

    def __post_init__(self) -> None:
        cut, where, chunks = self.cut, self.where, self.schedule.num_chunks
        self.num_stages = where.mesh.shape[PIPE]
        self.division = divide_blocks(cut.num_blocks, self.num_stages, chunks)
        self._cut = self.per_device or cut
        self._stages = Stages(self._cut, where, self.division)
        self._outer = OuterSums(where.mesh, where.batch_axes, self.sums, self.gradients)

    def __call__(
        self, leaves: Sequence[Array], microbatches: Sequence[Array], scale: Array | None = None
    ) -> PipelineSums:
        """Evaluate on the step's leaf values and stacked microbatches [count, …]."""
        count = microbatches[0].shape[0]
        slots, rows = table_rows(
            self.schedule.table(self.num_microbatches, self.num_stages),
            rounds=count // self.num_microbatches,
        )
        shape = self.schedule.shape(self.num_microbatches, self.num_stages)
        states, last_state = self._outer_states(leaves, count)
        weights, outer, losses, changing = self._mapped(shape, slots)(
            rows,
            {stack.number: leaves[stack.number] for stack in self._cut.stacks},
            {leaf.number: leaves[leaf.number] for leaf in self._cut.outer},
            list(microbatches),
            states,
            scale,
        )
        gradients = weights | self._outer.reduced(outer)
        changed = changing | last_state
        layout = self.cut.traced.layout
        return PipelineSums(
            [gradients[n] for n in layout.numbers("param")],
            losses,
            [changed.get(n, leaves[n]) for n in layout.numbers("state")],
        )

    def _mapped(self, shape: Shape, slots: SlotCounts) -> Callable[..., _StageResults]:
        """Return `_run` as a function of whole arrays, mapped over the stages."""
        axes = self.where.batch_axes
        on_stage, whole = PartitionSpec(PIPE), PartitionSpec()
        samples = PartitionSpec(None, axes) if axes else whole
        return jax.shard_map(
            partial(self._run, shape, slots),
            mesh=self.where.mesh,
            in_specs=(PartitionSpec(None, PIPE), on_stage, whole, samples, whole, whole),
            out_specs=(on_stage, self._outer.stacked, whole, on_stage),
            axis_names={PIPE, *axes},
            check_vma=False,
        )

    def _run(
        self,
        shape: Shape,
        slots: SlotCounts,
        rows: TickRow,
        stacks: LeafValues,
        outer: LeafValues,
        batch: list[Array],
        states: LeafValues,
        scale: Array | None,
    ) -> _StageResults:
        """Run one stage on its leaves."""
        trained = {s.number: stacks[s.number] for s in self._cut.stacks if s.kind == "weight"}
        weights, pullback = jax.vjp(lambda leaves: self._stages.prepare(leaves, "weight"), trained)
        values = self._stages.values(weights, stacks, outer, Microbatch(batch, states))
        executor = StageExecutor(
            self._stages.functions(outer),
            values,
            shape,
            slots,
            platform=self.where.view.platform,
            scale=scale,
            constrain=self._constrain,
        )
        sums = executor.run(jax.tree.map(lambda column: column[:, 0], rows))
        stacked = executor.work.stacked(sums.weights)
        (weights,) = pullback(
            {n: total.astype(values.weights[n].dtype) for n, total in stacked.items()}
        )
        axes = self.where.batch_axes
        weights = lax.psum(weights, axes) if axes else weights
        outer = {n: total[None] for n, total in sums.outer.items()}
        losses = lax.psum(sums.losses, (PIPE, *axes))
        changing = self._cut.inputs_of("changing")
        changed = {row.stack.number: sums.changing[row.position] for row in changing}
        return weights, outer, losses, changed

    def _outer_states(self, leaves: Sequence[Array], count: int) -> tuple[LeafValues, LeafValues]:
        """Return, for state outside blocks, its values before each microbatch and at the end."""
        following = self._cut.next_state
        if following is None:
            return {}, {}
        changing = [leaf.number for leaf in self._cut.outer_of("changing")]
        evaluator = wide_evaluator() if self.where.wide else Evaluator()

        def step(state: LeafValues, _: None) -> tuple[LeafValues, LeafValues]:
            arguments = [state.get(n, leaves[n]) for n in following.reads]
            new = evaluator.run(following.program, arguments)
            return dict(zip(changing, new, strict=True)), state

        after, before = lax.scan(step, {n: leaves[n] for n in changing}, None, length=count)
        return before, after

    def _constrain(self, sums: StageSums) -> StageSums:
        """Fix the sharding of the running sums to that of the optimizer."""
        inside = jax.sharding.get_abstract_mesh()

        def place(value: Array, number: int) -> Array:
            return lax.with_sharding_constraint(value, NamedSharding(inside, self.sums[number]))

        numbers = {row.position: row.stack.number for row in self._cut.inputs_of("weight")}
        weights = [
            {position: place(total, numbers[position]) for position, total in block.items()}
            for block in sums.weights
        ]
        outer = {number: place(value, number) for number, value in sums.outer.items()}
        return replace(sums, weights=weights, outer=outer)


@dataclass(frozen=True)
class OuterSums:
    """Sums the outer weights' gradients over the devices of all stages.

    ``batch_axes`` are those whose devices have sums of their own, besides the stages; ``sums`` and
    ``gradients`` are as in `PipelinedLoss`.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    sums: Sequence[PartitionSpec]
    gradients: Sequence[Placement]

    @property
    def stacked(self) -> PartitionSpec:
        """The layout of the sums of all devices, stacked: a new dim 0 counts the devices."""
        return PartitionSpec((PIPE, *self.batch_axes))

    def reduced(self, stacked: LeafValues) -> LeafValues:
        """Return the gradients, in their placement.

        No axis is left to the compiler, which would gather what other axes shard before it
        scatters a sum over the stages.
        """
        if not stacked:
            return {}
        each = jax.shard_map(
            lambda values: {n: self._reduce(n, value[0]) for n, value in values.items()},
            mesh=self.mesh,
            in_specs=({n: PartitionSpec(*self.stacked, *self.sums[n]) for n in stacked},),
            out_specs={n: self._after(n) for n in stacked},
            check_vma=False,
        )
        return each(stacked)

    def _reduce(self, number: int, total: Array) -> Array:
        dim = self._pipe_dim(number)
        if dim is None:
            return lax.psum(total, (PIPE, *self.batch_axes))
        part = lax.psum_scatter(total, PIPE, scatter_dimension=dim, tiled=True)
        return lax.psum(part, self.batch_axes) if self.batch_axes else part

    def _pipe_dim(self, number: int) -> int | None:
        dims = self.gradients[number].dims
        return next((dim for dim, axes in enumerate(dims) if PIPE in axes), None)

    def _after(self, number: int) -> PartitionSpec:
        """Return the layout of a sum of which each stage keeps its part, as in its placement."""
        entries = [*self.sums[number]]
        dim = self._pipe_dim(number)
        if dim is None:
            return PartitionSpec(*entries)
        entries += [None] * (dim + 1 - len(entries))
        entries[dim] = (*entry_names(entries[dim]), PIPE)
        return PartitionSpec(*entries)
