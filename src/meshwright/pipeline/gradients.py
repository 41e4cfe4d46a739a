"""Loss and gradients of a batch, its microbatches overlapping in a pipeline of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.mesh.axes import PIPE
from meshwright.pipeline.contract import Losses, StageSums, StageValues
from meshwright.pipeline.cut import BlockCut
from meshwright.pipeline.division import divide_blocks
from meshwright.pipeline.execute import StageExecutor
from meshwright.pipeline.operations import Shape
from meshwright.pipeline.schedules import Schedule
from meshwright.pipeline.stages import StageContext, Stages
from meshwright.pipeline.tick_rows import SlotCounts, TickRow, table_rows
from meshwright.program.interpret import Interpreter
from meshwright.program.widen import Widening


@dataclass(frozen=True)
class PipelineSums:
    """What a batch gives.

    Attributes:
        gradients: for each parameter leaf, the sum of the microbatches' gradients, each times its
            weight (and the loss scale).
        losses: totals and weights, added up.
        state: the state leaves afterwards.
    """

    gradients: list[Any]
    losses: Losses
    state: list[Any]


class PipelinedLoss:
    """A loss and its gradients, computed by stages that work on different microbatches at a time.

    Args:
        cut: the loss and where it is cut, rows in the order of stages.
        where: the mesh and what it asks for.
        schedule: when each stage does what.
        num_microbatches: microbatches between two flushes.
        sums: by number of the step leaf, where its gradient lives on one stage while it grows.
        own: the same loss for the samples of one device, which adds up its own gradients until the
            end; None where gradients are of all samples from the start.
    """

    def __init__(
        self,
        cut: BlockCut,
        where: StageContext,
        schedule: Schedule,
        num_microbatches: int,
        sums: Sequence[PartitionSpec],
        own: BlockCut | None = None,
    ) -> None:
        self.cut, self.where, self.schedule = cut, where, schedule
        self.num_microbatches = num_microbatches
        self.num_stages = where.mesh.shape[PIPE]
        self.division = divide_blocks(cut.num_blocks, self.num_stages, schedule.num_chunks)
        self._cut = own or cut
        self._stages = Stages(self._cut, where, self.division)
        self._sums = list(sums)
        steps = cut.traced.layout.step_leaves
        self._params = [n for n, step in enumerate(steps) if step.leaf.role == "param"]

    def __call__(
        self,
        leaves: Sequence[Any],
        microbatches: Sequence[Any],
        scale: Array | None = None,
    ) -> PipelineSums:
        """Evaluate on the step's leaf values and stacked microbatches [count, …]."""
        count = microbatches[0].shape[0]
        forms, rows = table_rows(
            self.schedule.table(self.num_microbatches, self.num_stages),
            rounds=count // self.num_microbatches,
        )
        shape = self.schedule.shape(self.num_microbatches, self.num_stages)
        states, after = self._outer_states(leaves, count)
        axes = self.where.batch_axes
        spread, whole = PartitionSpec(PIPE), PartitionSpec()
        samples = PartitionSpec(None, axes) if axes else whole
        mapped = jax.shard_map(
            partial(self._run, shape, forms),
            mesh=self.where.mesh,
            in_specs=(PartitionSpec(None, PIPE), spread, whole, (samples, whole), whole),
            out_specs=(spread, whole, whole, spread),
            axis_names={PIPE, *axes},
            check_vma=False,
        )
        weights, outer, losses, changing = mapped(
            rows,
            [leaves[n] for n in self._cut.stacks],
            [leaves[n] for n in self._cut.outer],
            (list(microbatches), states),
            scale,
        )
        gradients = weights | dict(zip(self._stages.outer_params, outer, strict=True))
        changed = dict(zip(self._changing, changing, strict=True))
        changed |= dict(zip(self._cut.changed_outer, after, strict=True))
        return PipelineSums(
            [gradients[n] for n in self._params],
            losses,
            [changed.get(n, leaves[n]) for n in self._cut.states],
        )

    def _run(
        self,
        shape: Shape,
        forms: SlotCounts,
        rows: TickRow,
        stacks: list[Any],
        outer: list[Any],
        inputs: Any,
        scale: Array | None,
    ) -> tuple[dict[int, Any], list[Any], Losses, list[Any]]:
        """Run one stage: gradients of its blocks and of the rest, losses and changed state."""
        held = dict(zip(self._cut.stacks, stacks, strict=True))
        values, pullback, functions = self._values(held, outer, inputs)
        ticks = StageExecutor(
            functions,
            values,
            shape,
            forms,
            axis=PIPE,
            platform=self.where.platform,
            scale=scale,
            constrain=self._constrain,
        )
        found = ticks.run(jax.tree.map(lambda column: column[:, 0], rows))
        pairs = zip(found.weights, values.weights, strict=True)
        (weights,) = pullback([total.astype(own.dtype) for total, own in pairs])
        axes = self.where.batch_axes
        weights = lax.psum(weights, axes) if axes else weights
        return weights, *lax.psum((found.outer, found.losses), (PIPE, *axes)), found.changing

    @property
    def _changing(self) -> list[int]:
        return [self._cut.stack_of[n] for n in self._stages.changing_rows]

    def _values(
        self, stacks: Mapping[int, Any], outer: Sequence[Any], inputs: Any
    ) -> tuple[StageValues, Any, Any]:
        """Return what a stage holds, how gradients of it become those of leaves, and functions."""
        stages = self._stages
        others = dict(zip(self._cut.outer, outer, strict=True))
        trained = {n: a for n, a in stacks.items() if n in set(self._params)}
        weights, pullback = jax.vjp(lambda own: stages.prepare(own, stages.weight_rows), trained)
        params = set(stages.outer_params)
        skipped = params | set(self._cut.changed_outer)
        frozen = {n: a for n, a in others.items() if n not in skipped}
        values = StageValues(
            weights=weights,
            fixed=stages.prepare(stacks, stages.fixed_rows),
            changing=stages.prepare(stacks, stages.changing_rows),
            outer=[others[n] for n in stages.outer_params],
            inputs=inputs,
        )
        return values, pullback, stages.functions(frozen)

    def _outer_states(self, leaves: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
        """Return, for state outside of blocks, its values before each microbatch and at the end."""
        numbers = self._cut.changed_outer
        if not numbers:
            return [], []
        program, reads = self._cut.next_state
        interpreter = Widening() if self.where.wide else Interpreter()

        def step(state: list[Any], _: None) -> tuple[list[Any], list[Any]]:
            now = dict(zip(numbers, state, strict=True))
            arguments = [now.get(n, leaves[n]) for n in reads]
            return interpreter.run(program, arguments), state

        after, before = lax.scan(step, [leaves[n] for n in numbers], None, length=count)
        return before, after

    def _constrain(self, sums: StageSums) -> StageSums:
        """Fix where sums live while they grow: divided as the optimizer wants them."""
        inside = jax.sharding.get_abstract_mesh()

        def place(values: list[Any], numbers: Sequence[int]) -> list[Any]:
            return [
                lax.with_sharding_constraint(a, NamedSharding(inside, self._sums[n]))
                for a, n in zip(values, numbers, strict=True)
            ]

        stacks = [self._cut.stack_of[n] for n in self._stages.weight_rows]
        return StageSums(
            place(sums.weights, stacks),
            place(sums.outer, self._stages.outer_params),
            sums.losses,
            sums.changing,
        )
