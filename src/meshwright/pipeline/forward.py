"""The loss alone, by stages: what evaluation runs, without gradients and what they would keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.mesh.axes import PIPE
from meshwright.pipeline.contract import Losses, StageFunctions
from meshwright.pipeline.cut import BlockCut
from meshwright.pipeline.division import divide_blocks
from meshwright.pipeline.exchange_order import ExchangeOrder
from meshwright.pipeline.operations import Kind, Op, Shape
from meshwright.pipeline.stages import StageContext, Stages
from meshwright.pipeline.ticks import TickTable


def forward_table(num_microbatches: int, num_stages: int, num_chunks: int = 1) -> TickTable:
    """Return forward passes alone, tick by tick.

    What a stage hands on is used in the very next tick, so nothing has to be kept.
    """
    shape = Shape(num_microbatches, num_stages, num_chunks)
    trips = -(-num_microbatches // num_stages) * num_chunks

    def nth(number: int) -> tuple[Op, ...]:
        microbatch, chunk = shape.turn(number)
        here = 0 <= number < trips * num_stages and microbatch < num_microbatches
        return (Op(Kind.FORWARD, microbatch, chunk),) if here else ()

    ticks = [
        tuple(nth(tick - stage) for stage in range(num_stages))
        for tick in range(trips * num_stages + num_stages - 1)
    ]
    while not any(ticks[-1]):
        ticks.pop()
    return TickTable(shape, tuple(ticks))


class PipelinedForward:
    """A loss computed by stages that work on different microbatches at a time.

    Each stage reads its own blocks only; every microbatch starts from the same state.

    Args:
        cut: the loss and where it is cut, rows in the order of stages.
        where: the mesh and what it asks for.
        num_chunks: pieces of the model on each stage.
    """

    def __init__(self, cut: BlockCut, where: StageContext, num_chunks: int) -> None:
        self.cut, self.where, self.num_chunks = cut, where, num_chunks
        self.num_stages = where.mesh.shape[PIPE]
        division = divide_blocks(cut.num_blocks, self.num_stages, num_chunks)
        self._each = division.most
        self._stages = Stages(cut, where, division)

    def __call__(self, leaves: Sequence[Any], microbatches: Sequence[Any]) -> Losses:
        """Return totals and weights for stacked microbatches [count, …], added up."""
        table = forward_table(microbatches[0].shape[0], self.num_stages, self.num_chunks)

        def run(rows: Any, stacks: list[Any], outer: list[Any], inputs: list[Any]) -> Losses:
            own = jax.tree.map(lambda column: column[:, 0], rows)
            return lax.psum(self._run(own, stacks, outer, inputs), PIPE)

        spread, whole = PartitionSpec(PIPE), PartitionSpec()
        mapped = jax.shard_map(
            run,
            mesh=self.where.mesh,
            in_specs=(PartitionSpec(None, PIPE), spread, whole, whole),
            out_specs=whole,
            axis_names={PIPE},
            check_vma=False,
        )
        return mapped(
            _columns(table),
            [leaves[n] for n in self.cut.stacks],
            [leaves[n] for n in self.cut.outer],
            list(microbatches),
        )

    def _run(self, rows: Any, stacks: list[Any], outer: list[Any], inputs: list[Any]) -> Losses:
        """Execute the ticks of one stage and return what it added up."""
        stages, others = self._stages, dict(zip(self.cut.outer, outer, strict=True))
        held = dict(zip(self.cut.stacks, stacks, strict=True))
        functions = stages.functions(
            {n: a for n, a in others.items() if n not in self._given_apart}
        )
        blocks = [
            stages.prepare(held, numbers)
            for numbers in (stages.weight_rows, stages.fixed_rows, stages.changing_rows)
        ]
        params = [others[n] for n in stages.outer_params]
        state = [others[n] for n in self.cut.changed_outer]
        one = _One(functions, params, self._each, blocks)
        pairs = Shape(inputs[0].shape[0], self.num_stages, self.num_chunks).ring(1)

        def microbatch(number: Any) -> Any:
            batch = [lax.dynamic_index_in_dim(a, number, 0, keepdims=False) for a in inputs]
            return batch, state

        def tick(carry: Any, row: Any) -> tuple[Any, None]:
            message, losses = carry
            number, chunk, stage = row
            virtual = chunk * self.num_stages + stage
            message = lax.cond(
                number >= 0,
                lambda: one.forward(message, microbatch(number), chunk, virtual),
                lambda: message,
            )
            ends = (number >= 0) & (virtual == self.num_stages * self.num_chunks - 1)
            turns = ExchangeOrder(self.where.platform)
            losses = turns.when(
                "head",
                ends,
                lambda now: jax.tree.map(jnp.add, now, one.losses(message, microbatch(number))),
                losses,
            )
            return (turns.send("send", message, PIPE, pairs, None), losses), None

        first = microbatch(jnp.zeros((), jnp.int32))
        message = _zeros(jax.eval_shape(lambda: one.embed(first)))
        losses = _zeros(jax.eval_shape(lambda: one.losses(message, first)))
        (_, losses), _ = lax.scan(tick, (message, losses), rows)
        return losses

    @property
    def _given_apart(self) -> set[int]:
        return {*self._stages.outer_params, *self.cut.changed_outer}


class _One:
    """What a stage does with one microbatch."""

    def __init__(
        self, functions: StageFunctions, outer: list[Any], each: int, blocks: list[list[Any]]
    ) -> None:
        self._functions, self._outer, self._each, self._blocks = functions, outer, each, blocks

    def embed(self, inputs: Any) -> list[Any]:
        return self._functions.embed(self._pick(self._functions.embed_reads), inputs)

    def losses(self, message: list[Any], inputs: Any) -> Losses:
        return self._functions.head(self._pick(self._functions.head_reads), message, inputs)

    def forward(self, arrived: list[Any], inputs: Any, chunk: Any, virtual: Any) -> list[Any]:
        message = lax.cond(
            virtual == 0,
            # Branches that end in differently laid out arrays are refused by the compiler.
            lambda: lax.optimization_barrier(self.embed(inputs)),
            lambda: lax.optimization_barrier(arrived),
        )
        weights, fixed, changing = (
            [
                [lax.dynamic_index_in_dim(a, chunk * self._each + n, 0, False) for a in leaves]
                for n in range(self._each)
            ]
            for leaves in self._blocks
        )
        outer = self._pick(self._functions.blocks_read)
        after, _ = self._functions.blocks(weights, fixed, outer, message, changing, inputs, virtual)
        return after

    def _pick(self, numbers: Sequence[int]) -> list[Any]:
        return [self._outer[n] for n in numbers]


def _columns(table: TickTable) -> Any:
    """Return a table as arrays [ticks, stages] of microbatch (-1 for none), chunk and stage."""
    size = (len(table.ticks), table.shape.num_stages)
    microbatch, chunk = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    for tick, stage, op in table.placed():
        microbatch[tick, stage], chunk[tick, stage] = op.microbatch, op.chunk
    stages = np.broadcast_to(np.arange(size[1], dtype=np.int32), size)
    return microbatch, chunk, stages


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
