"""The executor: one program that every stage runs, tick by tick, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.pipeline.arrays import (
    add_row,
    added,
    empty_slots,
    is_float,
    placed,
    read_slot,
    times,
    write_slot,
)
from meshwright.pipeline.contract import (
    Losses,
    Message,
    StageFunctions,
    StageSums,
    StageValues,
)
from meshwright.pipeline.exchange_order import ExchangeOrder
from meshwright.pipeline.op_counts import named
from meshwright.pipeline.operations import Shape
from meshwright.pipeline.stage_vjp import StageVJP
from meshwright.pipeline.tick_rows import SlotCounts, TickRow
from meshwright.program.policy import zeros_for_sums


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Between:
    """What lies between two ticks."""

    inbox: list[Any]
    gradients: list[Any]
    kept: list[Any]
    cuts: list[Any]
    sums: StageSums


class StageExecutor:
    """Runs the ticks of one stage, inside a `jax.shard_map` over the pipe axis.

    Args:
        functions: the model's stages.
        values: what this stage holds.
        shape: the pipeline's size.
        forms: which kinds of operations and messages the tick table has, and its slots.
        axis: name of the mesh axis of stages.
        platform: of the devices.
        scale: factor on the loss while gradients are taken, which half precision needs.
        constrain: fixes where sums live while they grow.
    """

    def __init__(
        self,
        functions: StageFunctions,
        values: StageValues,
        shape: Shape,
        forms: SlotCounts,
        *,
        axis: str,
        platform: str,
        scale: Array | None,
        constrain: Callable[[StageSums], StageSums],
    ) -> None:
        self.functions, self.values, self.shape, self.forms = functions, values, shape, forms
        self.axis, self.scale, self.constrain = axis, scale, constrain
        self.platform, self.turns = platform, ExchangeOrder(platform)
        held = values.weights + values.fixed + values.changing
        self.blocks = held[0].shape[0] // shape.num_chunks if held else 1
        self.message = self._message_shapes()
        self.program = self._differentiate()

    def run(self, rows: TickRow) -> StageSums:
        """Execute every row of the table and return this stage's sums."""
        sums = self.constrain(self._no_sums())
        empty = self._nothing(self.message)
        start = _Between(
            inbox=empty_slots(self.message, self.forms.num_activations),
            gradients=empty_slots(self._gradient_shapes(), self.forms.num_gradients),
            kept=empty_slots(self.program.kept_shapes, self.forms.num_kept),
            cuts=empty_slots(self._cut_shapes(), self.forms.num_cuts),
            sums=sums,
        )
        back = self._nothing(self._gradient_shapes())
        (end, _, _), _ = lax.scan(self._tick, (start, empty, back), rows)
        return end.sums

    def _tick(self, carry: Any, row: TickRow) -> tuple[Any, None]:
        between, arrived, arrived_back = carry
        self.turns = ExchangeOrder(self.platform)
        inbox = write_slot(between.inbox, arrived, row.activation_in)
        gradients = write_slot(between.gradients, arrived_back, row.gradient_in)
        between = replace(between, inbox=inbox, gradients=gradients)
        between, sent = self._forward(between, arrived, row)
        between, sent_back = self._backward(between, arrived_back, row)
        if self.forms.splits_backward:
            between = self._weight(between, row)
        between = replace(between, sums=self.constrain(between.sums))
        forms, axis = self.forms, self.axis
        sends = None if forms.always_sends else row.sends
        arrived = self.turns.send("send", sent, axis, self.shape.ring(1), sends)
        sends_back = None if forms.always_sends_back else row.sends_back
        arrived_back = self.turns.send(
            "send_back", sent_back, axis, self.shape.ring(-1), sends_back
        )
        return (between, arrived, arrived_back), None

    def _forward(
        self, between: _Between, unused: Message, row: TickRow
    ) -> tuple[_Between, Message]:
        """Return what is there afterwards and what is sent; without an operation that is unused."""
        op = row.forward

        def work(now: Any) -> Any:
            kept, changing, _ = now
            inputs = self._inputs(op.microbatch)
            outer = self._outer(self.functions.embed_reads)
            message = lax.cond(
                op.reads < 0,
                # Branches that end in arrays divided in different ways are refused by the compiler.
                named(
                    "embedding",
                    lambda: lax.optimization_barrier(self.functions.embed(outer, inputs)),
                ),
                lambda: read_slot(between.inbox, op.reads),
            )
            operands = self._operands(message, changing, op.chunk, inputs, row.stage)
            taken = self.program.forward(*self._held(op.chunk), *operands)
            whole, rows = taken.further
            kept = write_slot(kept, taken.kept, op.keeps)
            return kept, self._put_rows(changing, rows, op.chunk), self._join(taken.y, whole)

        kept, changing, message = self.turns.when(
            "forward",
            op.microbatch >= 0,
            work,
            (between.kept, between.sums.changing, unused),
        )
        between = replace(between, kept=kept, sums=replace(between.sums, changing=changing))
        return self._head(between, message, row), message

    def _head(self, between: _Between, message: Message, row: TickRow) -> _Between:
        """Where a microbatch has come to its end, evaluate the loss and start its way back."""
        reads, slot = self.functions.head_reads, row.gradient_own

        def work(now: Any) -> Any:
            losses, outer, slots = now
            found, gradients, back, tail = self._loss_gradient(message, row.forward.microbatch)
            together = jax.tree.map(jnp.add, losses, found)
            return together, added(outer, gradients, tail), write_slot(slots, [*back, *tail], slot)

        sums = between.sums
        losses, outer, gradients = self.turns.when(
            "head",
            slot >= 0,
            work,
            (sums.losses, self._pick(sums.outer, reads), between.gradients),
        )
        sums = replace(sums, losses=losses, outer=placed(sums.outer, reads, outer))
        return replace(between, gradients=gradients, sums=sums)

    def _loss_gradient(self, message: Message, microbatch: Array) -> Any:
        floats, whole = self._split(message)
        inputs = self._inputs(microbatch)

        def mean(outer: list[Any], floats: list[Any]) -> tuple[Array, Losses]:
            losses = self.functions.head(outer, self._join(floats, whole), inputs)
            return losses.objective.mean, losses

        outer = self._outer(self.functions.head_reads)
        value, pullback, losses = jax.vjp(mean, outer, floats, has_aux=True)
        weight = losses.objective.weight.astype(value.dtype)
        start = weight if self.scale is None else self.scale.astype(value.dtype)
        gradients, back = pullback(start)
        return losses, gradients, back, [] if self.scale is None else [weight]

    def _backward(
        self, between: _Between, unused: list[Any], row: TickRow
    ) -> tuple[_Between, list[Any]]:
        op, split = row.backward, self.forms.splits_backward

        def work(now: Any) -> Any:
            sums, cuts, _ = now
            back = read_slot(between.gradients, op.reads)
            gradient, tail = back[: self.num_floats], back[self.num_floats :]
            held, kept = self._held(op.chunk), read_slot(between.kept, op.keeps)
            if split:
                gradient, cut = self.program.input_gradient(*held, kept, gradient)
                # The weight rides along until the weight gradient needs it.
                cuts = write_slot(cuts, [*cut, *tail], op.cut)
            else:
                weights, gradient = self.program.backward(*held, kept, gradient)
                sums = self._add(sums, weights, op.chunk, tail)
            return sums, cuts, [*gradient, *tail]

        sums, cuts, gradient = self.turns.when(
            "backward",
            op.microbatch >= 0,
            work,
            (self._block_sums(between.sums), between.cuts, unused),
        )
        between = self._with_block_sums(replace(between, cuts=cuts), sums)
        return self._embed_gradient(between, gradient, row), gradient

    def _weight(self, between: _Between, row: TickRow) -> _Between:
        op = row.weight

        def work(sums: Any) -> Any:
            cut = read_slot(between.cuts, op.cut)
            count = len(cut) - (self.scale is not None)
            kept = read_slot(between.kept, op.keeps)
            weights = self.program.weight_gradient(*self._held(op.chunk), kept, cut[:count])
            return self._add(sums, weights, op.chunk, cut[count:])

        sums = self.turns.when("weight", op.microbatch >= 0, work, self._block_sums(between.sums))
        return self._with_block_sums(between, sums)

    def _embed_gradient(self, between: _Between, back: list[Any], row: TickRow) -> _Between:
        """Where a microbatch is back at the start, add up the gradients of what came before."""
        op, reads = row.backward, self.functions.embed_reads

        def work(outer: list[Any]) -> list[Any]:
            inputs = self._inputs(op.microbatch)
            _, pullback = jax.vjp(
                lambda outer: self._split(self.functions.embed(outer, inputs))[0],
                self._outer(reads),
            )
            (gradients,) = pullback(back[: self.num_floats])
            return added(outer, gradients, back[self.num_floats :])

        if not reads:
            return between
        here = (op.microbatch >= 0) & (op.chunk == 0) & (row.stage == 0)
        outer = self.turns.when("embedding", here, work, self._pick(between.sums.outer, reads))
        sums = replace(between.sums, outer=placed(between.sums.outer, reads, outer))
        return replace(between, sums=sums)

    def _differentiate(self) -> StageVJP:
        def stage(weights: Any, fixed: Any, floats: Any, others: Any) -> Any:
            rows, outer = weights
            whole, changing, inputs, virtual = others
            message, changing = self.functions.blocks(
                rows, fixed, outer, self._join(floats, whole), changing, inputs, virtual
            )
            floats, whole = self._split(message)
            return floats, (whole, changing)

        zero = jnp.zeros((), jnp.int32)
        message = self._nothing(self.message)
        weights, fixed = self._held(zero)
        operands = self._operands(message, self.values.changing, zero, self._inputs(zero), zero)
        return StageVJP(stage, weights, fixed, *operands)

    def _held(self, chunk: Array) -> tuple[Any, Any]:
        """Return what a chunk's forward and backward both read."""
        rows = self._rows(self.values.weights, chunk)
        outer = self._outer(self.functions.blocks_read)
        return (rows, outer), self._rows(self.values.fixed, chunk)

    def _operands(
        self, message: Message, changing: list[Any], chunk: Array, inputs: Any, stage: Array
    ) -> tuple[Any, Any]:
        floats, whole = self._split(message)
        virtual = chunk * self.shape.num_stages + stage
        return floats, (whole, self._rows(changing, chunk), inputs, virtual)

    def _message_shapes(self) -> list[jax.ShapeDtypeStruct]:
        return jax.eval_shape(
            lambda: self.functions.embed(
                self._outer(self.functions.embed_reads), self._inputs(jnp.zeros((), jnp.int32))
            )
        )

    def _gradient_shapes(self) -> list[Any]:
        weight = [] if self.scale is None else [self._losses_shape().objective.total]
        return [a for a in self.message if is_float(a)] + weight

    def _cut_shapes(self) -> list[Any]:
        if not self.forms.splits_backward:
            return []
        return [*self.program.cut_shapes, *self._gradient_shapes()[self.num_floats :]]

    @property
    def num_floats(self) -> int:
        """How many parts of a message have a gradient."""
        return sum(map(is_float, self.message))

    def _split(self, message: Message) -> tuple[list[Any], list[Any]]:
        return [a for a in message if is_float(a)], [a for a in message if not is_float(a)]

    def _join(self, floats: Sequence[Any], whole: Sequence[Any]) -> Message:
        first, second = iter(floats), iter(whole)
        return [next(first) if is_float(a) else next(second) for a in self.message]

    def _inputs(self, microbatch: Array) -> Any:
        return jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, microbatch, 0, keepdims=False), self.values.inputs
        )

    def _outer(self, numbers: Sequence[int]) -> list[Any]:
        return self._pick(self.values.outer, numbers)

    def _rows(self, leaves: list[Any], chunk: Array) -> list[list[Any]]:
        """Return a chunk's leaves block by block."""
        if self.shape.num_chunks > 1:
            start = chunk * self.blocks
            leaves = [lax.dynamic_slice_in_dim(a, start, self.blocks) for a in leaves]
        return [[leaf[block] for leaf in leaves] for block in range(self.blocks)]

    def _put_rows(self, leaves: list[Any], rows: list[list[Any]], chunk: Array) -> list[Any]:
        for block, row in enumerate(rows):
            at = chunk * self.blocks + block
            leaves = [
                lax.dynamic_update_index_in_dim(a, new.astype(a.dtype), at, 0)
                for a, new in zip(leaves, row, strict=True)
            ]
        return leaves

    def _block_sums(self, sums: StageSums) -> tuple[list[Any], list[Any]]:
        """Return the sums that gradients of blocks are added to."""
        return sums.weights, self._pick(sums.outer, self.functions.blocks_read)

    def _with_block_sums(self, between: _Between, found: tuple[list[Any], list[Any]]) -> _Between:
        weights, outer = found
        outer = placed(between.sums.outer, self.functions.blocks_read, outer)
        return replace(between, sums=replace(between.sums, weights=weights, outer=outer))

    def _add(self, sums: Any, gradients: Any, chunk: Array, tail: list[Any]) -> Any:
        weights, outer = sums
        rows, more = gradients
        for block, row in enumerate(rows):
            at = chunk * self.blocks + block if self.shape.num_chunks > 1 else block
            weights = [add_row(a, times(g, tail), at) for a, g in zip(weights, row, strict=True)]
        return weights, added(outer, more, tail)

    def _pick(self, values: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        return [values[n] for n in numbers]

    def _nothing(self, shapes: Sequence[Any]) -> list[Any]:
        return [jnp.zeros(a.shape, a.dtype) for a in shapes]

    def _no_sums(self) -> StageSums:
        losses = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._losses_shape())
        return StageSums(
            weights=zeros_for_sums(self.values.weights),
            outer=zeros_for_sums(self.values.outer),
            losses=losses,
            changing=list(self.values.changing),
        )

    def _losses_shape(self) -> Losses:
        message = self._nothing(self.message)
        inputs = self._inputs(jnp.zeros((), jnp.int32))
        outer = self._outer(self.functions.head_reads)
        return jax.eval_shape(lambda: self.functions.head(outer, message, inputs))
