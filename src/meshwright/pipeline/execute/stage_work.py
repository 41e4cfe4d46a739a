"""The computation of one stage for one microbatch: forward passes and gradients."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.pipeline.divide.stages import (
    BlockInputs,
    BlockOutputs,
    BlockRow,
    LeafValues,
    Losses,
    Message,
    Microbatch,
    StageFunctions,
    StageSums,
    StageValues,
)
from meshwright.pipeline.execute.slots import (
    BackwardMessage,
    BlockWeights,
    HeadGradient,
    MessageSplit,
    add_row,
    added,
    times,
    zeros_like_shapes,
)
from meshwright.pipeline.execute.stage_vjp import HeldValues, StageVJP
from meshwright.pipeline.schedule.operations import Shape
from meshwright.program.flops import forward_flops
from meshwright.program.jaxpr.equations import structs_of
from meshwright.program.trace.precision_policy import zeros_for_sums
from meshwright.trees import PyTree


class StageForward:
    """The forward functions of one stage with its leaves."""

    def __init__(self, functions: StageFunctions, values: StageValues, num_chunks: int) -> None:
        self.functions, self.values, self.num_chunks = functions, values, num_chunks
        held = [*values.weights.values(), *values.fixed.values(), *values.changing.values()]
        self.num_blocks = held[0].shape[0] // num_chunks if held else 1

    def embed(self, microbatch: Microbatch) -> Message:
        """Return the input of the first virtual stage."""
        return self.functions.embed(self.values.pick(self.functions.embed_reads), microbatch)

    def blocks(
        self, arrived: Message, microbatch: Microbatch, chunk: Array, virtual_stage: Array
    ) -> Message:
        """Run a chunk's blocks on the message that arrived, or the first chunk on the embedding."""
        message = lax.cond(
            virtual_stage == 0,
            # The compiler refuses branches whose results are sharded differently.
            lambda: lax.optimization_barrier(self.embed(microbatch)),
            lambda: lax.optimization_barrier(arrived),
        )
        inputs = BlockInputs(
            message,
            self.rows(self.values.changing, chunk),
            microbatch,
            virtual_stage,
            weights=self.rows(self.values.weights, chunk),
            fixed=self.rows(self.values.fixed, chunk),
            outer=self.values.pick(self.functions.blocks_read),
        )
        return self.functions.blocks(inputs).message

    def losses(self, message: Message, microbatch: Microbatch) -> Losses:
        """Return the losses of a microbatch that has passed all blocks."""
        return self.functions.head(self.values.pick(self.functions.head_reads), message, microbatch)

    def rows(self, stacks: BlockRow, chunk: Array) -> list[BlockRow]:
        """Return a chunk's leaves block by block."""
        if self.num_chunks > 1:
            start = chunk * self.num_blocks
            stacks = {
                n: lax.dynamic_slice_in_dim(a, start, self.num_blocks) for n, a in stacks.items()
            }
        return [{n: a[block] for n, a in stacks.items()} for block in range(self.num_blocks)]


class StageWork(StageForward):
    """Forward and backward passes of one stage, each for one microbatch.

    ``only_looks_up`` says whether the embedding has no products.
    """

    def __init__(
        self, functions: StageFunctions, values: StageValues, shape: Shape, scale: Array | None
    ) -> None:
        super().__init__(functions, values, shape.num_chunks)
        self.shape, self.scale = shape, scale
        self._first = jnp.zeros((), jnp.int32)
        embedding = jax.make_jaxpr(lambda: self.embed(self.microbatch(self._first)))()
        shapes: PyTree = structs_of(embedding.jaxpr.outvars)
        self.message_shapes: Message = shapes
        self.only_looks_up = forward_flops(embedding.jaxpr) == 0
        self.split = MessageSplit.of(self.message_shapes)
        self.vjp = self._differentiate()
        self._casts = self._cast()
        # Once, not in every tick, which would copy the blocks' parts of each stack.
        self._held = self._hold(self._first) if shape.num_chunks == 1 else None

    @property
    def gradient_shapes(self) -> BackwardMessage:
        """Shapes of the gradients sent back from stage to stage."""
        weight = None if self.scale is None else self._losses_shape().objective.total
        floats, _ = self.split.split(self.message_shapes)
        return BackwardMessage(floats, weight)

    @property
    def cut_shapes(self) -> BackwardMessage:
        """Shapes of the values that an input gradient saves for its weight gradient."""
        # A record of shapes has the structure of one of arrays.
        cut: PyTree = self.vjp.cut_shapes
        return BackwardMessage(cut, self.gradient_shapes.weight)

    def zero_sums(self) -> StageSums:
        """Return the initial sums."""
        block = {n: a[: self.shape.num_chunks] for n, a in self.values.weights.items()}
        return StageSums(
            weights=[zeros_for_sums(block) for _ in range(self.num_blocks)],
            outer=zeros_for_sums(self.values.outer),
            losses=zeros_like_shapes(self._losses_shape()),
            changing=dict(self.values.changing),
        )

    def microbatch(self, number: Array) -> Microbatch:
        """Return the batch leaves and outer state of a microbatch."""
        return jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, number, 0, keepdims=False),
            self.values.microbatches,
        )

    def held(self, chunk: Array) -> HeldValues:
        """Return the values that both forward and backward of a chunk read."""
        return self._held or self._hold(chunk)

    def forward(
        self,
        message: Message,
        changing: BlockRow,
        chunk: Array,
        microbatch: Microbatch,
        stage: Array,
    ) -> tuple[BlockOutputs, list[Array]]:
        """Run a chunk's blocks; also return what backward needs of it."""
        floats, inputs = self._operands(message, changing, chunk, microbatch, stage)
        result = self.vjp.forward(self.held(chunk), floats, inputs)
        others, rows = result.further
        return BlockOutputs(self.split.join(result.y, others), rows), result.saved

    def head_gradient(self, message: Message, number: Array) -> HeadGradient:
        """Return the losses of a microbatch after the last block, and their gradients."""
        floats, others = self.split.split(message)
        microbatch = self.microbatch(number)

        def mean(outer: LeafValues, floats: list[Array]) -> tuple[Array, Losses]:
            losses = self.functions.head(outer, self.split.join(floats, others), microbatch)
            return losses.objective.mean, losses

        outer = self.values.pick(self.functions.head_reads)
        value, pullback, losses = jax.vjp(mean, outer, floats, has_aux=True)
        weight = losses.objective.weight.astype(value.dtype)
        start = weight if self.scale is None else self.scale.astype(value.dtype)
        gradients, back = pullback(start)
        rest = None if self.scale is None else weight
        return HeadGradient(losses, gradients, BackwardMessage(back, rest))

    def embed_gradient(self, number: Array, back: BackwardMessage) -> LeafValues:
        """Return the gradients of the weights that the embedding reads."""
        microbatch = self.microbatch(number)
        _, pullback = jax.vjp(
            lambda outer: self.split.split(self.functions.embed(outer, microbatch))[0],
            self.values.pick(self.functions.embed_reads),
        )
        (gradients,) = pullback(back.values)
        return gradients

    def add(
        self, sums: BlockWeights, gradients: BlockWeights, chunk: Array, weight: Array | None
    ) -> BlockWeights:
        """Return sums with the gradients of a chunk's weights added."""
        weights = [
            {n: add_row(a, times(row[n], weight), chunk) for n, a in totals.items()}
            for totals, row in zip(sums.rows, gradients.rows, strict=True)
        ]
        mine = {n: sums.outer[n] for n in gradients.outer}
        return BlockWeights(weights, sums.outer | added(mine, gradients.outer, weight))

    def stacked(self, weights: list[BlockRow]) -> BlockRow:
        """Return the sums of all blocks as stacks, in the order of the stage's leaves."""
        return jax.tree.map(
            lambda *blocks: jnp.stack(blocks, 1).reshape(-1, *blocks[0].shape[1:]), *weights
        )

    def put_rows(self, stacks: BlockRow, rows: list[BlockRow], chunk: Array) -> BlockRow:
        """Return stacks with a chunk's rows replaced."""
        for block, row in enumerate(rows):
            at = chunk * self.num_blocks + block
            stacks = {
                n: lax.dynamic_update_index_in_dim(a, row[n].astype(a.dtype), at, 0)
                for n, a in stacks.items()
            }
        return stacks

    def _differentiate(self) -> StageVJP:
        def chunk(
            weights: BlockWeights, fixed: list[BlockRow], floats: list[Array], inputs: BlockInputs
        ) -> tuple[list[Array], tuple[list[Array], list[BlockRow]]]:
            whole = replace(
                inputs,
                message=self.split.join(floats, inputs.message),
                weights=weights.rows,
                fixed=fixed,
                outer=weights.outer,
            )
            message, changing = self.functions.blocks(whole)
            floats, others = self.split.split(message)
            return floats, (others, changing)

        zero = self._first
        message = zeros_like_shapes(self.message_shapes)
        held = HeldValues(*self._constant(self.values, zero))
        changing, microbatch = self.values.changing, self.microbatch(zero)
        floats, inputs = self._operands(message, changing, zero, microbatch, zero)
        return StageVJP(chunk, held, floats, inputs)

    def _cast(self) -> StageValues:
        """Return the stage's values in the dtypes in which its blocks read them."""
        weights, fixed = self.vjp.dtypes_read
        values = self.values

        def cast(arrays: LeafValues, dtypes: dict[int, Any]) -> LeafValues:
            # Random keys cannot be cast, not even to their own dtype.
            return {
                n: a if dtypes.get(n, a.dtype) == a.dtype else a.astype(dtypes[n])
                for n, a in arrays.items()
            }

        return replace(
            values,
            weights=cast(values.weights, weights.rows[0]),
            fixed=cast(values.fixed, fixed[0]),
            outer=cast(values.outer, weights.outer),
        )

    def _hold(self, chunk: Array) -> HeldValues:
        return HeldValues(*self._constant(self.values, chunk), self._constant(self._casts, chunk))

    def _constant(self, values: StageValues, chunk: Array) -> tuple[BlockWeights, list[BlockRow]]:
        """Return the weights of a chunk, and its constant leaves."""
        outer = values.pick(self.functions.blocks_read)
        return BlockWeights(self.rows(values.weights, chunk), outer), self.rows(values.fixed, chunk)

    def _operands(
        self,
        message: Message,
        changing: BlockRow,
        chunk: Array,
        microbatch: Microbatch,
        stage: Array,
    ) -> tuple[list[Array], BlockInputs]:
        floats, others = self.split.split(message)
        virtual_stage = chunk * self.shape.num_stages + stage
        return floats, BlockInputs(others, self.rows(changing, chunk), microbatch, virtual_stage)

    def _losses_shape(self) -> Losses:
        message, first = zeros_like_shapes(self.message_shapes), self.microbatch(self._first)
        return jax.eval_shape(lambda: self.losses(message, first))
