"""The stages of a traced loss: embedding, blocks and head as functions, their values and sums."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from meshwright.mesh.axes import PIPE
from meshwright.pipeline.divide.block_cut import BlockCut, LeafKind, Region
from meshwright.pipeline.divide.division import Division
from meshwright.pipeline.divide.stage_rules import WithinStage
from meshwright.program.evaluate.evaluator import Environment, Evaluator, ScanBody
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.evaluate.weight_uses import GatherSpecs
from meshwright.program.evaluate.widen import is_narrow
from meshwright.program.jaxpr.equations import Value, Var, aval_of
from meshwright.program.on_mesh.layer_scans import LayerScans, shared_weights
from meshwright.program.on_mesh.mesh_forward import (
    LocalDraws,
    ProgramLayouts,
    mesh_evaluator,
    weight_uses,
)
from meshwright.program.on_mesh.remat import Remat
from meshwright.weighted import Weighted

LeafValues = dict[int, Array]
"""Values of step leaves by the number of the step leaf."""

BlockRow = dict[int, Array]
"""The leaves of one block, by position among the layered inputs of the scan."""

Message = list[Array]
"""The arrays that one stage sends to the next."""


class Losses(NamedTuple):
    """Totals and weights of the objective and of the metrics."""

    objective: Weighted
    metrics: dict[str, Weighted]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Microbatch:
    """The inputs of one microbatch, or of several, and the state outside the blocks before each."""

    batch: list[Array]
    state: LeafValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInputs:
    """The inputs of the blocks of one virtual stage.

    Where gradients are computed, the message at first has only the leaves without one. Blocks
    replace ``changing``; ``outer`` are the trained leaves outside the blocks that they read.
    """

    message: Message
    changing: list[BlockRow]
    microbatch: Microbatch
    virtual_stage: Array
    weights: list[BlockRow] = field(default_factory=list[BlockRow])
    fixed: list[BlockRow] = field(default_factory=list[BlockRow])
    outer: LeafValues = field(default_factory=dict[int, Array])


class BlockOutputs(NamedTuple):
    """The outputs of the blocks of a virtual stage: a message, and each block's new state."""

    message: Message
    changing: list[BlockRow]


@dataclass(frozen=True)
class StageFunctions:
    """A model cut into stages, as functions of one microbatch, and the outer weights each reads."""

    embed: Callable[[LeafValues, Microbatch], Message]
    blocks: Callable[[BlockInputs], BlockOutputs]
    head: Callable[[LeafValues, Message, Microbatch], Losses]
    embed_reads: tuple[int, ...]
    blocks_read: tuple[int, ...]
    head_reads: tuple[int, ...]


@dataclass(frozen=True)
class StageValues:
    """The leaves of one stage during a batch; those of its blocks are [chunks × blocks, …]."""

    weights: BlockRow
    fixed: BlockRow
    changing: BlockRow
    outer: LeafValues
    microbatches: Microbatch

    def pick(self, numbers: Sequence[int]) -> LeafValues:
        """Return the outer weights with these numbers."""
        return {n: self.outer[n] for n in numbers}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageSums:
    """The sums of a stage over microbatches.

    Gradients are weighted, those of a chunk's blocks [chunks, …] each. ``outer`` and ``losses`` are
    its shares of what all stages add up, ``changing`` the state of its blocks afterwards.
    """

    weights: list[BlockRow]
    outer: LeafValues
    losses: Losses
    changing: BlockRow


@dataclass(frozen=True)
class StageContext:
    """The mesh and the layouts of a traced loss inside a pipeline, weights by step leaf.

    ``draws`` are the random draws of a loss of one device's samples; None for one of all samples.
    """

    mesh: Mesh
    layouts: ProgramLayouts
    gathers: Mapping[int, GatherSpecs]
    whole: Sequence[PartitionSpec]
    remat: Remat
    wide: bool
    draws: LocalDraws | None = None

    @property
    def view(self) -> MeshView:
        """The mesh as a stage sees it."""
        return MeshView(self.mesh, frozenset({PIPE, *self.batch_axes}))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which each device has its own samples."""
        return () if self.draws is None else tuple(self.draws.batch_axes)


class Stages:
    """A cut loss as functions of leaf values."""

    def __init__(self, cut: BlockCut, where: StageContext, division: Division) -> None:
        self.cut, self.where, self.division = cut, where, division
        self.uses = weight_uses(cut.traced, where.gathers, where.whole)

    def prepare(self, stacks: Mapping[int, Array], kind: LeafKind) -> BlockRow:
        """Return stacks as blocks read them: cast and gathered, unless each block does so."""
        inputs = self.cut.inputs_of(kind)
        whole = {each.position: stacks[each.stack.number] for each in inputs}
        if self.where.remat.gather_per_block:
            return whole
        uses = [(each.position, self.uses.get(each.atom)) for each in inputs]
        prepare = self._evaluator.weights.prepare
        return whole | {n: prepare(whole[n], use) for n, use in uses if use is not None}

    def values(
        self, weights: BlockRow, stacks: LeafValues, outer: LeafValues, microbatches: Microbatch
    ) -> StageValues:
        """Return the values of a stage, given its prepared weights and its step leaves."""
        return StageValues(
            weights=weights,
            fixed=self.prepare(stacks, "fixed"),
            changing=self.prepare(stacks, "changing"),
            outer={leaf.number: outer[leaf.number] for leaf in self.cut.outer_of("weight")},
            microbatches=microbatches,
        )

    def functions(self, outer: Mapping[int, Array]) -> StageFunctions:
        """Return the stages, given the values of the step leaves outside the blocks."""
        frozen = {leaf.variable: outer[leaf.number] for leaf in self.cut.outer_of("fixed")}
        cut = self.cut

        def embed(outer: LeafValues, microbatch: Microbatch) -> Message:
            env = self._environment(frozen, outer, microbatch)
            self._evaluator.equations(cut.embedding.eqns, env)
            carry = [jnp.asarray(env.read(atom)) for atom in cut.embedding.outputs]
            return [*carry, *self._no_results(carry)]

        def head(outer: LeafValues, message: Message, microbatch: Microbatch) -> Losses:
            env = self._environment(frozen, outer, microbatch)
            num_carry = len(cut.scan.final)
            env.values.update(zip(cut.scan.final, message[:num_carry], strict=True))
            results = [cut.scan.results[n] for n in cut.collected]
            env.values.update(zip(results, message[num_carry:], strict=True))
            self._evaluator.equations(cut.head.eqns, env)
            outputs = [jnp.asarray(env.read(atom)) for atom in cut.head.outputs]
            value = cut.traced.read_outputs(outputs)
            return Losses(value.objective, value.metrics)

        def blocks(inputs: BlockInputs) -> BlockOutputs:
            env = self._environment(frozen, inputs.outer, inputs.microbatch)
            self._evaluator.equations(cut.shared.eqns, env)
            body = LayerScans(self.where.remat).body(cut.scan.eqn, self._constants(env), env)
            computed = {n: jnp.asarray(env.read(atom)) for n, atom in cut.computed.items()}
            return self._run_blocks(body, inputs, computed)

        return StageFunctions(
            embed,
            blocks,
            head,
            embed_reads=_weights_of(cut.embedding),
            blocks_read=_weights_of(cut.shared),
            head_reads=_weights_of(cut.head),
        )

    def _run_blocks(self, body: ScanBody, inputs: BlockInputs, computed: BlockRow) -> BlockOutputs:
        num_carry = len(self.cut.scan.initial)
        carry, collected = inputs.message[:num_carry], inputs.message[num_carry:]
        changed: list[BlockRow] = []
        first, count = self._first_and_count(inputs.virtual_stage)
        # By position of a block's state among its inputs, the result that replaces it.
        changing = [(row.position, row.stack.result) for row in self.cut.inputs_of("changing")]
        replaced = {n: result for n, result in changing if result is not None}
        for block in range(self.division.most):
            number = first + block
            row = inputs.weights[block] | inputs.fixed[block] | inputs.changing[block]
            for position, values in computed.items():
                row[position] = lax.dynamic_index_in_dim(values, number, 0, keepdims=False)
            before = [*carry, *collected]
            carry, results = body(carry, [row[n] for n in range(len(self.cut.scan.layered))])
            wanted = [results[n] for n in self.cut.collected]
            collected = [
                lax.dynamic_update_index_in_dim(buffer, result, number, 0)
                for buffer, result in zip(collected, wanted, strict=True)
            ]
            if not self.division.even:
                # All stages wait for the longest, so padding runs too; its results are dropped.
                pairs = zip([*carry, *collected], before, strict=True)
                chosen = [jnp.where(block < count, new, old) for new, old in pairs]
                carry, collected = chosen[:num_carry], chosen[num_carry:]
            changed.append({n: results[result] for n, result in replaced.items()})
        return BlockOutputs([*carry, *collected], changed)

    def _first_and_count(self, virtual_stage: Array) -> tuple[Array, Array | int]:
        """Return the number of a virtual stage's first block, and how many it has."""
        division = self.division
        if division.even:
            return virtual_stage * division.most, division.most
        starts, counts = jnp.asarray(division.starts), jnp.asarray(division.counts)
        return starts[virtual_stage], counts[virtual_stage]

    def _no_results(self, carry: Sequence[Array]) -> Message:
        """Return empty arrays for the per-block results that are read after the blocks."""
        wide = any(a.dtype == jnp.float64 for a in carry)
        shapes = [aval_of(self.cut.scan.results[n]) for n in self.cut.collected]
        return [
            jnp.zeros(a.shape, jnp.float64 if wide and is_narrow(a) else a.dtype) for a in shapes
        ]

    def _environment(
        self, frozen: Mapping[Var, Array], outer: LeafValues, microbatch: Microbatch
    ) -> Environment:
        closed, variables = self.cut.traced.closed, self.cut.jaxpr.invars
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(frozen)
        values.update((variables[n], value) for n, value in (microbatch.state | outer).items())
        of_batch = variables[len(self.cut.traced.layout.step_leaves) :]
        values.update(zip(of_batch, microbatch.batch, strict=True))
        return Environment(self._evaluator, values)

    def _constants(self, env: Environment) -> list[Value]:
        """Return the constants of the scan, half-precision weights in the parameter's dtype."""
        in_param_dtype = shared_weights(self.cut.scan.eqn, env)
        return [
            env.in_param_dtype(atom) if number in in_param_dtype else env.read(atom)
            for number, atom in enumerate(self.cut.scan.constants)
        ]

    @cached_property
    def _evaluator(self) -> Evaluator:
        where, mesh = self.where, self.where.view
        first = [*([] if where.draws is None else [where.draws.draw]), WithinStage(mesh)]
        return mesh_evaluator(
            mesh, self.uses, where.remat, where.layouts, wide=where.wide, first=first
        )


def _weights_of(region: Region) -> tuple[int, ...]:
    return tuple(leaf.number for leaf in region.weights)
