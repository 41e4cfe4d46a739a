"""The loss by stages without gradients, as evaluation runs it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from meshwright.mesh.axes import PIPE
from meshwright.pipeline.divide.block_cut import BlockCut
from meshwright.pipeline.divide.division import divide_blocks
from meshwright.pipeline.divide.stages import (
    LeafValues,
    Losses,
    Message,
    Microbatch,
    StageContext,
    Stages,
)
from meshwright.pipeline.execute.exchanges import ExchangeOrder, Transfer
from meshwright.pipeline.execute.slots import zeros_like_shapes
from meshwright.pipeline.execute.stage_work import StageForward
from meshwright.pipeline.execute.tick_rows import TickOp, TickRow, allocate_slots
from meshwright.pipeline.schedule.operations import Kind, Op, Shape
from meshwright.pipeline.schedule.timeline import TickTable, in_lockstep


def forward_table(num_microbatches: int, num_stages: int, num_chunks: int = 1) -> TickTable:
    """Return forward passes alone; messages are used in the next tick, so there are no slots."""
    shape = Shape(num_microbatches, num_stages, num_chunks)
    trips = -(-num_microbatches // num_stages) * num_chunks
    passes = [shape.nth_pass(number) for number in range(trips * num_stages)]
    ops = [Op(Kind.FORWARD, *each) for each in passes if each[0] < num_microbatches]
    return in_lockstep([ops] * num_stages, shape)


class PipelinedForward:
    """A loss computed by stages that work on different microbatches at the same time.

    Each stage reads its own blocks only; every microbatch starts from the same state.
    """

    def __init__(self, cut: BlockCut, where: StageContext, num_chunks: int) -> None:
        self.cut, self.where, self.num_chunks = cut, where, num_chunks
        self.num_stages = where.mesh.shape[PIPE]
        division = divide_blocks(cut.num_blocks, self.num_stages, num_chunks)
        self._stages = Stages(cut, where, division)

    def __call__(self, leaves: Sequence[Array], microbatches: Sequence[Array]) -> Losses:
        """Return totals and weights for stacked microbatches [count, …], added up."""
        table = forward_table(microbatches[0].shape[0], self.num_stages, self.num_chunks)

        def run(rows: TickRow, stacks: LeafValues, outer: LeafValues, batch: list[Array]) -> Losses:
            own = jax.tree.map(lambda column: column[:, 0], rows)
            return lax.psum(self._run(own, stacks, outer, batch), PIPE)

        on_stage, whole = PartitionSpec(PIPE), PartitionSpec()
        mapped = jax.shard_map(
            run,
            mesh=self.where.mesh,
            in_specs=(PartitionSpec(None, PIPE), on_stage, whole, whole),
            out_specs=whole,
            axis_names={PIPE},
            check_vma=False,
        )
        return mapped(
            allocate_slots(table),
            {stack.number: leaves[stack.number] for stack in self.cut.stacks},
            {leaf.number: leaves[leaf.number] for leaf in self.cut.outer},
            list(microbatches),
        )

    def _run(
        self, rows: TickRow, stacks: LeafValues, outer: LeafValues, batch: list[Array]
    ) -> Losses:
        """Execute the ticks of one stage and return its sums."""
        state = {leaf.number: outer[leaf.number] for leaf in self.cut.outer_of("changing")}
        weights = self._stages.prepare(stacks, "weight")
        values = self._stages.values(weights, stacks, outer, Microbatch(batch, state))
        forward = StageForward(self._stages.functions(outer), values, self.num_chunks)
        shape = Shape(batch[0].shape[0], self.num_stages, self.num_chunks)
        pairs, last = shape.ring(1), shape.num_virtual - 1

        def microbatch(number: Array) -> Microbatch:
            own = [lax.dynamic_index_in_dim(a, number, 0, keepdims=False) for a in batch]
            return Microbatch(own, state)

        def tick(
            carry: tuple[Message, Losses], row: TickRow
        ) -> tuple[tuple[Message, Losses], None]:
            (message, losses), op = carry, row.forward
            virtual_stage = op.chunk * self.num_stages + row.stage
            message = lax.cond(
                op.microbatch >= 0,
                lambda: forward.blocks(message, microbatch(op.microbatch), op.chunk, virtual_stage),
                lambda: message,
            )
            order = ExchangeOrder(self.where.view.platform)
            losses = order.when(
                TickOp.HEAD,
                (op.microbatch >= 0) & (virtual_stage == last),
                lambda sums: jax.tree.map(
                    jnp.add, sums, forward.losses(message, microbatch(op.microbatch))
                ),
                losses,
            )
            return (order.send(Transfer(TickOp.SEND, message, pairs, None)), losses), None

        first = microbatch(jnp.zeros((), jnp.int32))
        message = zeros_like_shapes(jax.eval_shape(lambda: forward.embed(first)))
        losses = zeros_like_shapes(jax.eval_shape(lambda: forward.losses(message, first)))
        (_, losses), _ = lax.scan(tick, (message, losses), rows)
        return losses
