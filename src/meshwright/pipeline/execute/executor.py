"""The executor: one program that every stage runs, tick by tick, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.pipeline.divide.stages import (
    BlockRow,
    LeafValues,
    Message,
    StageFunctions,
    StageSums,
    StageValues,
)
from meshwright.pipeline.execute.exchanges import ExchangeOrder, Transfer
from meshwright.pipeline.execute.slots import (
    BackwardMessage,
    BlockWeights,
    HeadGradient,
    added,
    empty_slots,
    keep,
    read_slot,
    write_slot,
    zeros_like_shapes,
)
from meshwright.pipeline.execute.stage_work import StageWork
from meshwright.pipeline.execute.tick_rows import SlotCounts, TickOp, TickRow, named, packed
from meshwright.pipeline.schedule.operations import Shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TickCarry:
    """The state between ticks: slots of what waits, sums, and what has just arrived."""

    inbox: Message
    gradients: BackwardMessage
    saved: list[Array]
    cuts: BackwardMessage
    sums: StageSums
    arrived: Message
    arrived_back: BackwardMessage


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _AfterForward:
    """What a forward pass changes; the head's part only if the head is nested in it."""

    saved: list[Array]
    changing: BlockRow
    head: HeadGradient | None


@dataclass(eq=False)
class StageExecutor:
    """Runs the ticks of one stage, inside a `jax.shard_map` over the pipe axis.

    ``scale`` is a factor on the loss, for half precision; ``constrain`` fixes the sums' sharding.
    """

    functions: StageFunctions
    values: StageValues
    shape: Shape
    slots: SlotCounts
    platform: str
    scale: Array | None
    constrain: Callable[[StageSums], StageSums]

    def __post_init__(self) -> None:
        self.order = ExchangeOrder(self.platform)
        self.work = StageWork(self.functions, self.values, self.shape, self.scale)
        # Head and embedding run inside their pass, so that ticks without one need not ask whether
        # they run. On CPUs, a flag that follows a loop keeps exchanges in order, so they come after
        # the pass there, unless a stage is a single device and exchanges nothing within itself.
        single = jax.sharding.get_abstract_mesh().size == self.shape.num_stages
        self._nests = self.platform != "cpu" or single
        # To drop what other stages looked up takes less time than to ask the host.
        self._all_look_up = single and self.platform != "cpu" and self.work.only_looks_up

    def run(self, rows: TickRow) -> StageSums:
        """Execute every row of the table and return this stage's sums."""
        table, read = packed(rows)
        end, _ = lax.scan(lambda carry, row: self._tick(carry, read(row)), self._start(), table)
        return end.sums

    def _start(self) -> TickCarry:
        """Return the state before the first tick: empty slots and sums of zero."""
        work, slots = self.work, self.slots
        message, gradient = work.message_shapes, work.gradient_shapes
        cuts = work.cut_shapes if slots.splits_backward else BackwardMessage([], None)
        return TickCarry(
            inbox=empty_slots(message, slots.num_activations),
            gradients=empty_slots(gradient, slots.num_gradients),
            saved=empty_slots(work.vjp.saved_shapes, slots.num_saved),
            cuts=empty_slots(cuts, slots.num_cuts),
            sums=self.constrain(work.zero_sums()),
            arrived=zeros_like_shapes(message),
            arrived_back=zeros_like_shapes(gradient),
        )

    def _tick(self, carry: TickCarry, row: TickRow) -> tuple[TickCarry, None]:
        self.order = ExchangeOrder(self.platform)
        inbox = keep(carry.inbox, carry.arrived, row.activation_in)
        gradients = keep(carry.gradients, carry.arrived_back, row.gradient_in)
        carry = replace(carry, inbox=inbox, gradients=gradients)
        carry, sent = self._forward(carry, row)
        carry, sent_back = self._backward(carry, row)
        if self.slots.splits_backward:
            carry = self._weight_gradient(carry, row)
        sums = self.constrain(carry.sums)
        arrived, arrived_back = self.order.exchange(
            Transfer(TickOp.SEND, sent, self.shape.ring(1), row.sends),
            Transfer(TickOp.SEND_BACK, sent_back, self.shape.ring(-1), row.sends_back),
        )
        return replace(carry, sums=sums, arrived=arrived, arrived_back=arrived_back), None

    def _forward(self, carry: TickCarry, row: TickRow) -> tuple[TickCarry, Message]:
        """Run the tick's forward pass, if any; return the new carry and the message to send."""
        op, work = row.forward, self.work

        def run(now: tuple[_AfterForward, Message]) -> tuple[_AfterForward, Message]:
            after, _ = now
            microbatch = work.microbatch(op.microbatch)

            def embed() -> Message:
                # The compiler refuses branches whose results are sharded differently.
                return lax.optimization_barrier(work.embed(microbatch))

            arrived = partial(read_slot, carry.inbox, op.reads)
            if self._all_look_up:
                chosen = partial(jnp.where, op.reads < 0)
                message = jax.tree.map(chosen, work.embed(microbatch), arrived())
            else:
                message = lax.cond(op.reads < 0, named(TickOp.EMBEDDING, embed), arrived)
            result, kept = work.forward(message, after.changing, op.chunk, microbatch, row.stage)
            changing = work.put_rows(after.changing, result.changing, op.chunk)
            saved = write_slot(after.saved, kept, op.saved)
            after = replace(after, saved=saved, changing=changing)
            if after.head is not None:
                after = replace(after, head=self._head(after.head, result.message, row))
            return after, result.message

        sums = carry.sums
        outer = {n: sums.outer[n] for n in self.functions.head_reads}
        head = HeadGradient(sums.losses, outer, carry.gradients)
        before = _AfterForward(carry.saved, sums.changing, head if self._nests else None)
        # Without a forward pass, no stage reads the message.
        after, message = self.order.when(
            TickOp.FORWARD, op.microbatch >= 0, run, (before, carry.arrived)
        )
        head = after.head or self._head(head, message, row)
        sums = replace(
            sums, changing=after.changing, losses=head.losses, outer=sums.outer | head.outer
        )
        return replace(carry, saved=after.saved, gradients=head.back, sums=sums), message

    def _head(self, sums: HeadGradient, message: Message, row: TickRow) -> HeadGradient:
        """After the last block, evaluate the loss and its gradient."""
        slot = row.gradient_own

        def run(sums: HeadGradient) -> HeadGradient:
            head = self.work.head_gradient(message, row.forward.microbatch)
            return HeadGradient(
                jax.tree.map(jnp.add, sums.losses, head.losses),
                added(sums.outer, head.outer, head.back.weight),
                write_slot(sums.back, head.back, slot),
            )

        return self.order.when(TickOp.HEAD, slot >= 0, run, sums)

    def _backward(self, carry: TickCarry, row: TickRow) -> tuple[TickCarry, BackwardMessage]:
        """Run the tick's backward pass, if any; return the new carry and the gradient to send."""
        op, work = row.backward, self.work

        def run(
            now: tuple[BlockWeights, BackwardMessage, BackwardMessage],
        ) -> tuple[BlockWeights, BackwardMessage, BackwardMessage]:
            sums, cuts, _ = now
            back = read_slot(carry.gradients, op.reads)
            held, saved = work.held(op.chunk), read_slot(carry.saved, op.saved)
            if self.slots.splits_backward:
                values, cut = work.vjp.input_gradient(held, saved, back.values)
                cuts = write_slot(cuts, replace(back, values=cut), op.cut)
            else:
                weights, values = work.vjp.backward(held, saved, back.values)
                sums = work.add(sums, weights, op.chunk, back.weight)
            gradient = replace(back, values=values)
            if self._nests:
                sums = self._embed_gradient(sums, gradient, row)
            return sums, cuts, gradient

        embed_reads = self.functions.embed_reads
        before = self._block_sums(carry, embed_reads if self._nests else ())
        now = (before, carry.cuts, carry.arrived_back)
        sums, cuts, gradient = self.order.when(TickOp.BACKWARD, op.microbatch >= 0, run, now)
        carry = self._with_block_sums(replace(carry, cuts=cuts), sums)
        if not self._nests:
            sums = self._embed_gradient(self._block_sums(carry, embed_reads), gradient, row)
            carry = self._with_block_sums(carry, sums)
        return carry, gradient

    def _weight_gradient(self, carry: TickCarry, row: TickRow) -> TickCarry:
        """Add the gradients of weights whose input gradient an earlier tick has computed."""
        op = row.weight

        def run(sums: BlockWeights) -> BlockWeights:
            cut = read_slot(carry.cuts, op.cut)
            saved = read_slot(carry.saved, op.saved)
            weights = self.work.vjp.weight_gradient(self.work.held(op.chunk), saved, cut.values)
            return self.work.add(sums, weights, op.chunk, cut.weight)

        sums = self.order.when(TickOp.WEIGHT, op.microbatch >= 0, run, self._block_sums(carry))
        return self._with_block_sums(carry, sums)

    def _embed_gradient(
        self, sums: BlockWeights, back: BackwardMessage, row: TickRow
    ) -> BlockWeights:
        """After the backward of the first block, add the gradients of the embedding."""
        op, reads = row.backward, self.functions.embed_reads

        def run(outer: LeafValues) -> LeafValues:
            return added(outer, self.work.embed_gradient(op.microbatch, back), back.weight)

        if not reads:
            return sums
        here = (op.microbatch >= 0) & (op.chunk == 0) & (row.stage == 0)
        mine = {n: sums.outer[n] for n in reads}
        if self._all_look_up:
            back = replace(back, values=[jnp.where(here, value, 0) for value in back.values])
            outer = run(mine)
        else:
            outer = self.order.when(TickOp.EMBEDDING, here, run, mine)
        return replace(sums, outer=sums.outer | outer)

    def _block_sums(self, carry: TickCarry, more: Sequence[int] = ()) -> BlockWeights:
        """Return the sums to which gradients of blocks, and of these outer weights, are added."""
        outer = {n: carry.sums.outer[n] for n in {*self.functions.blocks_read, *more}}
        return BlockWeights(carry.sums.weights, outer)

    def _with_block_sums(self, carry: TickCarry, sums: BlockWeights) -> TickCarry:
        outer = carry.sums.outer | sums.outer
        return replace(carry, sums=replace(carry.sums, weights=sums.rows, outer=outer))
