"""The traced loss on a mesh: weights gathered, activations constrained, blocks rematerialized.

Within a `jax.shard_map` it is the loss of one device's samples, with the random numbers that they
would get in the whole batch.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.errors import Setting, UserError
from meshwright.program.blocks.block_lists import BlockSegment, Outside, Segment, cut_segments
from meshwright.program.blocks.to_scan import casts_of
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.dependencies import variables_read
from meshwright.program.evaluate.evaluator import Environment, Evaluator, Rows, Rule
from meshwright.program.evaluate.half_functions import HalfFunctions
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.evaluate.weight_uses import GatherSpecs, Weights, WeightUse
from meshwright.program.evaluate.widen import WIDE_RULES, Float64
from meshwright.program.jaxpr.equations import Equation, Literal, Value, Var, aval_of, bind
from meshwright.program.kernels.context_attention import NO_EXCHANGES, ContextExchanges
from meshwright.program.kernels.find_kernels import NO_KERNELS, Kernels
from meshwright.program.on_mesh.layer_scans import LayerScans
from meshwright.program.on_mesh.local_ops import LocalOp, LocalOps
from meshwright.program.on_mesh.loop_reads import NO_LOOP_READS, LoopReads
from meshwright.program.on_mesh.loop_weights import LoopWeights
from meshwright.program.on_mesh.mesh_rules import (
    AddWeights,
    ExchangePositions,
    GroupedConvolutions,
    KernelRule,
    StateScans,
    WeightGradients,
    cast_leaf,
    rearrange_weight,
)
from meshwright.program.on_mesh.remat import Remat
from meshwright.program.on_mesh.run_blocks import BlockRunner, RowsOf
from meshwright.program.on_mesh.shared_inputs import SharedInput, SharedInputs
from meshwright.program.trace.traced_loss import LossValue, TracedLoss


@dataclass(frozen=True, kw_only=True)
class ProgramLayouts:
    """What is known of a program's variables on a mesh.

    Attributes:
        local_ops: operations that devices run on their own samples.
        shared_inputs: activations whose gradients several products add up.
        loop_reads: operations that read weights in loops, and treat samples by themselves.
        weights: variables of the program that depend on weights alone.
        kernels: regions of the program that kernels evaluate.
        exchanges: what attention exchanges over the context axis.
    """

    activations: Mapping[Var, PartitionSpec] = field(default_factory=dict[Var, PartitionSpec])
    local_ops: Mapping[Var, LocalOp] = field(default_factory=dict[Var, LocalOp])
    shared_inputs: Mapping[Var, SharedInput] = field(default_factory=dict[Var, SharedInput])
    loop_reads: LoopReads = NO_LOOP_READS
    weights: frozenset[Var] = frozenset()
    kernels: Kernels = NO_KERNELS
    exchanges: ContextExchanges = NO_EXCHANGES


class Forward:
    """The traced loss as a function of the step's leaves and a batch, evaluated on a mesh."""

    def __init__(
        self, traced: TracedLoss, evaluator: Evaluator, remat: Remat, kernels: Kernels
    ) -> None:
        self.traced, self._evaluator, self._blocks = traced, evaluator, _Blocks(remat)
        jaxpr = traced.closed.jaxpr
        saves_all = remat.policy is None
        segments = [Outside(tuple(jaxpr.eqns))] if saves_all else cut_segments(jaxpr)
        self._segments = [_with_inputs(segment, kernels) for segment in segments]

    def __call__(self, leaves: Sequence[Value], batch: Sequence[Value]) -> LossValue:
        """Evaluate the loss on the step's leaf values (in layout order) and batch leaves."""
        return self.traced.read_outputs(self.outputs(leaves, batch))

    def outputs(self, leaves: Sequence[Value], batch: Sequence[Value]) -> list[Value]:
        """Return the program's outputs as they are: its results, then the new state."""
        closed = self.traced.closed
        env = self._evaluator.environment(closed, [*leaves, *batch])
        self._blocks.run(self._segments, env)
        return [env.value(atom) for atom in closed.jaxpr.outvars]


class _Blocks(BlockRunner):
    """Runs the blocks of a loss.

    Weights are gathered inside of each block, or prepared for use before it.
    """

    def arguments(self, block: BlockSegment, env: Environment) -> dict[Any, Value]:
        """Return what a block reads: weights as they are stored if it gathers them, or prepared."""
        uses = env.evaluator.weights.uses
        if self.remat.gather_per_block:
            reads = dict.fromkeys(uses[v].leaf if v in uses else v for v in block.reads)
            values = {v: env.values[v] if v in uses else env.value(v) for v in reads}
        else:
            reads = _reads_casts(block, env.evaluator.weights)
            values = {v: env.in_param_dtype(v) if v in uses else env.value(v) for v in reads}
        found = {v: rows for v in reads if (rows := env.rows(v)) is not None}
        return {**values, **{RowsOf(v, rows.axes): rows.value for v, rows in found.items()}}

    def gathered(self, block: BlockSegment, weights: Weights) -> Collection[Var]:
        """Return the stored weights of a block, if it gathers them."""
        reads = [weights.uses[v] for v in block.reads if v in weights.uses]
        sharded = any(use.specs is not None for use in reads)
        return {use.leaf for use in reads} if self.remat.gather_per_block and sharded else ()

    def inside(self, arguments: Mapping[Any, Value], evaluator: Evaluator) -> Environment:
        """Return the environment of a block, which has prepared weights if it gathers none."""
        uses = () if self.remat.gather_per_block else evaluator.weights.uses
        own = [v for v in arguments if not isinstance(v, RowsOf)]
        values = {v: arguments[v] for v in own if v not in uses}
        prepared = {v: arguments[v] for v in own if v in uses}
        inner = Environment(evaluator, values, prepared)
        for rows in set(arguments).difference(own):
            inner.copies[Rows, rows.variable] = Rows(arguments[rows], rows.axes)
        return inner


def _with_inputs(segment: Segment, kernels: Kernels) -> Segment:
    """Return a segment that also reads what its kernels do, such as a bias before it is moved."""
    if not isinstance(segment, BlockSegment):
        return segment
    made = dict.fromkeys(v for eqn in segment.eqns for v in eqn.outvars)
    inputs = (v for name in made if name in kernels.regions for v in kernels.regions[name].inputs)
    more = dict.fromkeys(v for v in inputs if v not in made)
    return replace(segment, reads=tuple(dict.fromkeys([*segment.reads, *more])))


def _reads_casts(block: BlockSegment, weights: Weights) -> list[Var]:
    """Return what a block reads, with weights that it casts itself replaced by their casts.

    Casts are prepared outside of the block, as its other weights are.
    """
    casts = [v for eqn in block.eqns for v in eqn.outvars[:1] if weights.is_cast(v)]
    rest = [eqn for eqn in block.eqns if not set(eqn.outvars) & set(casts)]
    computed = {v for eqn in block.eqns for v in eqn.outvars}
    by_kernels = set(block.reads) - set(variables_read(block.eqns))
    read = [*variables_read(rest), *(v for v in block.reads if v in by_kernels)]
    return [*(v for v in read if v not in computed), *casts]


def mesh_evaluator(
    mesh: MeshView,
    uses: Mapping[Var, WeightUse],
    remat: Remat,
    layouts: ProgramLayouts,
    *,
    wide: bool,
    first: Sequence[Rule] = (),
    lookups: bool = True,
) -> Evaluator:
    """Return an evaluator of a program on a mesh.

    Args:
        mesh: where it runs.
        uses: the variables that are parameters.
        remat: what layers of a stack save for their backward pass.
        layouts: what is known of the program's variables there.
        wide: compute in float64.
        first: rules that come before those of the mesh.
        lookups: whether the gradients of lookups need a layout.
    """
    kernels = layouts.kernels
    shardings = {v: mesh.sharding(spec) for v, spec in layouts.activations.items()}
    # With kernels=none, programs are evaluated as they are written.
    on_gpu = kernels.sums_in_parts and mesh.platform == "gpu" and mesh.planned_for is None
    rules = [
        *first,
        KernelRule(mesh, kernels, shardings),
        ExchangePositions(mesh, layouts.exchanges.equations),
        StateScans(mesh, layouts.exchanges.scans),
        cast_leaf,
        GroupedConvolutions(mesh, frozenset(layouts.local_ops)),
        LocalOps(mesh, layouts.local_ops),
        SharedInputs(mesh, layouts.shared_inputs),
        LoopWeights(mesh, layouts.loop_reads),
        rearrange_weight,
        WeightGradients(mesh, lookups, rows=kernels.rows, layouts=layouts.activations),
        AddWeights(mesh, in_parts=kernels.sums_in_parts, rows=kernels.rows),
        # The compiler of CPUs drops the barriers that keep blocks apart.
        LayerScans(remat, by_block=mesh.platform != "cpu"),
    ]
    return Evaluator(
        [*rules, *WIDE_RULES] if wide else rules,
        numerics=Float64() if wide else HalfFunctions() if on_gpu else None,
        weights=Weights(
            uses, layouts.weights, mesh, gather_per_block=remat.gather_per_block, casts=not wide
        ),
        constraints={v: s for v, s in shardings.items() if v not in kernels.skipped},
    )


def weight_uses(
    traced: TracedLoss, gathers: Mapping[int, GatherSpecs], whole: Sequence[PartitionSpec]
) -> dict[Var, WeightUse]:
    """Find the variables that are parameters: the leaves and their casts.

    By number of the step leaf, ``gathers`` are the layouts of weights sharded over fsdp, and
    ``whole`` those when gathered.
    """
    jaxpr = traced.closed.jaxpr
    uses = {
        variable: WeightUse(
            variable, None, gathers.get(number), whole[number], step.leaf.role == "param"
        )
        for number, (variable, step) in enumerate(
            zip(jaxpr.invars, traced.layout.step_leaves, strict=False)
        )
        if step.leaf.is_weight
    }
    casts = casts_of(jaxpr.eqns, set(uses))
    uses |= {cast: replace(uses[leaf], dtype=aval_of(cast).dtype) for cast, leaf in casts.items()}
    reads = Counter(
        uses[atom].leaf
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "dot_general"
        for atom in eqn.invars
        if not isinstance(atom, Literal) and atom in uses
    )
    return {variable: replace(use, shared=reads[use.leaf] > 1) for variable, use in uses.items()}


class LocalDraws:
    """Draws random numbers for the whole microbatch and keeps this device's part.

    Bits are a function of (key, position): a device that draws for all samples gets the same bits
    as without `shard_map`. This costs some arithmetic, and nothing is sent.

    Args:
        whole: the dims of the loss of a whole microbatch, in which the dim of samples is known.
        local: the dims of the same loss for one device's part, which may be a single sample: its
            dim could be any dim of size 1.
        batch_axes: the mesh axes that samples are sharded over, outermost first, and their sizes.
    """

    def __init__(self, whole: DimClasses, local: DimClasses, batch_axes: Mapping[str, int]) -> None:
        self.batch_axes = dict(batch_axes)
        self._sample_dims: dict[Var, int] = {}
        whole_draws, local_draws = _draws(whole), _draws(local)
        if len(whole_draws) != len(local_draws):
            raise UserError(
                f"{Setting('training.sync_gradients_every')} cannot be used: how often the loss "
                "draws random numbers depends on the number of samples",
                why=f"{len(whole_draws)} times for a microbatch, {len(local_draws)} for one "
                "device's part",
                fix=f"write {Setting('training.sync_gradients_every', 1)}",
            )
        for (program, eqn), (_, local_eqn) in zip(whole_draws, local_draws, strict=True):
            for dim, factors in enumerate(program.dims(eqn.outvars[0])):
                if factors and factors[0].id in whole.batch:
                    self._sample_dims[local_eqn.outvars[0]] = dim

    def draw(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a draw that has the samples in one of its dims; None for other equations."""
        if eqn.primitive.name != "random_bits" or eqn.outvars[0] not in self._sample_dims:
            return None
        dim = self._sample_dims[eqn.outvars[0]]
        shape = list(eqn.params["shape"])
        size = shape[dim]
        shape[dim] = size * math.prod(self.batch_axes.values())
        params = {**eqn.params, "shape": tuple(shape)}
        (bits,) = bind(eqn.replace(params=params), env.operands(eqn))
        start = jax.lax.axis_index(tuple(self.batch_axes)) * size
        return [jax.lax.dynamic_slice_in_dim(bits, start, size, dim)]


def _draws(classes: DimClasses) -> list[tuple[ProgramDims, Equation]]:
    """Return the equations that draw random bits, with the programs they are in."""
    return [both for both in classes.equations() if both[1].primitive.name == "random_bits"]
