"""The traced loss on a mesh: weights gathered, activations pinned, blocks rematerialized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import PartitionSpec

from meshwright.program.blocks.segments import Block, cut_segments
from meshwright.program.blocks.to_scan import casts_of
from meshwright.program.evaluate.dependencies import variables_read
from meshwright.program.evaluate.evaluator import Environment, Evaluator, Rule
from meshwright.program.evaluate.gather import GatherSpecs
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.evaluate.weight_uses import Weights, WeightUse
from meshwright.program.evaluate.widen import WIDE_RULES, Float64
from meshwright.program.jaxpr.equations import Literal, Value, Var, aval_of
from meshwright.program.kernels.find_kernels import NO_KERNELS, Kernels
from meshwright.program.on_mesh.gather_ahead import after_last_block, run_block
from meshwright.program.on_mesh.kernel_rule import KernelRule
from meshwright.program.on_mesh.layer_scans import LayerScans
from meshwright.program.on_mesh.local_ops import LocalOp, LocalOps
from meshwright.program.on_mesh.loop_reads import NO_LOOP_READS, LoopReads
from meshwright.program.on_mesh.loop_weights import LoopWeights
from meshwright.program.on_mesh.mesh_rules import (
    AddWeights,
    GroupedConvolutions,
    WeightGradients,
    cast_leaf,
    rearrange_weight,
)
from meshwright.program.on_mesh.remat import Remat
from meshwright.program.on_mesh.shared_inputs import SharedInput, SharedInputs
from meshwright.program.trace.traced_loss import LossValue, TracedLoss


class Forward:
    """The loss as a function of the step's leaves and a batch, on a mesh.

    Args:
        traced: the traced loss.
        evaluator: evaluates it on the mesh.
        remat: what blocks save for their backward pass.
    """

    def __init__(self, traced: TracedLoss, evaluator: Evaluator, remat: Remat) -> None:
        self.traced, self._evaluator, self._remat = traced, evaluator, remat
        self._segments = cut_segments(traced.closed.jaxpr)

    def __call__(self, leaves: Sequence[Value], batch: Sequence[Value]) -> LossValue:
        """Evaluate the loss on the step's leaf values (in layout order) and batch leaves."""
        return self.traced.read_outputs(self.outputs(leaves, batch))

    def outputs(self, leaves: Sequence[Value], batch: Sequence[Value]) -> list[Value]:
        """Return the program's outputs as they are: its results, then the new state."""
        closed = self.traced.closed
        env = self._evaluator.environment(closed, [*leaves, *batch])
        blocks = [s for s in self._segments if isinstance(s, Block)]
        handed_on: list[Value] = []
        for segment in self._segments:
            if not isinstance(segment, Block) or self._remat.policy is None:
                self._evaluator.equations(segment.eqns, env)
            elif self._is_gathered(segment):
                handed_on = self._run_gathered(segment, env, handed_on)
                if segment is blocks[-1]:
                    self._end_blocks(segment, env, handed_on)
            else:
                self._run_block(segment, env)
        return [env.value(atom) for atom in closed.jaxpr.outvars]

    def _is_gathered(self, block: Block) -> bool:
        """Whether the weights of a block are gathered again for its backward pass."""
        uses = self._evaluator.weights.uses
        divided = any(uses[v].specs is not None for v in block.reads if v in uses)
        return self._remat.gather_per_block and divided

    def _run_gathered(self, block: Block, env: Environment, before: list[Value]) -> list[Value]:
        """Evaluate a block that gathers its weights, and return them divided, for the next one."""
        uses = env.evaluator.weights.uses
        leaves = list(dict.fromkeys(uses[v].leaf for v in block.reads if v in uses))
        others = [v for v in block.reads if v not in uses]

        def run(weights: Sequence[Value], values: Sequence[Value]) -> list[Value]:
            inner = dict(zip([*leaves, *others], [*weights, *values], strict=True))
            self._evaluator.equations(block.eqns, Environment(self._evaluator, inner, {}))
            return [inner[v] for v in block.results]

        assert self._remat.policy is not None
        results, handed_on = run_block(
            run,
            self._remat.policy,
            [env.values[leaf] for leaf in leaves],
            [env.value(v) for v in others],
            before,
        )
        env.values.update(zip(block.results, results, strict=True))
        return handed_on

    def _end_blocks(self, block: Block, env: Environment, handed_on: list[Value]) -> None:
        results = after_last_block([env.values[v] for v in block.results], handed_on)
        env.values.update(zip(block.results, results, strict=True))

    def _run_block(self, block: Block, env: Environment) -> None:
        """Evaluate a block under its checkpoint policy."""
        uses, inside = env.evaluator.weights.uses, self._remat.gather_per_block
        reads = block.reads if inside else self._reads_casts(block)
        arguments = [
            env.value(v)
            if v not in uses
            else env.values[uses[v].leaf]
            if inside
            else env.in_param_dtype(v)
            for v in reads
        ]

        def run(*values: Value) -> list[Value]:
            inner, prepared = dict[Var, Value](), dict[Var, Value]()
            for variable, value in zip(reads, values, strict=True):
                if variable not in uses:
                    inner[variable] = value
                elif inside:
                    inner[uses[variable].leaf] = value
                else:
                    prepared[variable] = value
            self._evaluator.equations(block.eqns, Environment(self._evaluator, inner, prepared))
            return [inner[v] for v in block.results]

        results = jax.checkpoint(run, policy=self._remat.policy)(*arguments)
        env.values.update(zip(block.results, results, strict=True))

    def _reads_casts(self, block: Block) -> list[Var]:
        """Return what a block reads, with weights that it casts itself replaced by their casts.

        Casts are prepared outside of the block, as its other weights are.
        """
        is_cast = self._evaluator.weights.is_cast
        casts = [v for eqn in block.eqns for v in eqn.outvars[:1] if is_cast(v)]
        rest = [eqn for eqn in block.eqns if not set(eqn.outvars) & set(casts)]
        computed = {v for eqn in block.eqns for v in eqn.outvars}
        return [*(v for v in variables_read(rest) if v not in computed), *casts]


def mesh_evaluator(
    mesh: MeshView,
    uses: Mapping[Var, WeightUse],
    remat: Remat,
    *,
    wide: bool,
    pins: Mapping[Var, PartitionSpec] | None = None,
    local_ops: Mapping[Var, LocalOp] | None = None,
    shared_inputs: Mapping[Var, SharedInput] | None = None,
    loop_reads: LoopReads = NO_LOOP_READS,
    weight_only: Collection[Var] = (),
    kernels: Kernels = NO_KERNELS,
    first: Sequence[Rule] = (),
    lookups: bool = True,
) -> Evaluator:
    """Return an evaluator of a program on a mesh.

    Args:
        mesh: where it runs.
        uses: the variables that are parameters.
        remat: what layers of a stack save for their backward pass.
        wide: compute in float64.
        pins: layouts of activations.
        local_ops: operations that devices run on their own samples.
        shared_inputs: activations that several products share.
        loop_reads: operations that read weights in loops.
        weight_only: variables that hold weights and no data.
        kernels: regions that kernels evaluate.
        first: rules that come before those of the mesh.
        lookups: whether the gradients of lookups need a layout.
    """
    shardings = {v: mesh.sharding(spec) for v, spec in (pins or {}).items()}
    rules = [
        *first,
        KernelRule(mesh, kernels, shardings),
        cast_leaf,
        GroupedConvolutions(mesh, frozenset(local_ops or ())),
        LocalOps(mesh, local_ops or {}),
        SharedInputs(mesh, shared_inputs or {}),
        LoopWeights(mesh, loop_reads),
        rearrange_weight,
        WeightGradients(mesh, lookups, rows=kernels.rows),
        AddWeights(mesh, in_parts=kernels.sums_in_parts),
        # The compiler of CPUs drops the barriers that keep blocks apart.
        LayerScans(remat, by_block=mesh.platform != "cpu"),
    ]
    skipped = kernels.interior | kernels.elsewhere
    return Evaluator(
        [*rules, *WIDE_RULES] if wide else rules,
        numerics=Float64() if wide else None,
        weights=Weights(
            uses, weight_only, mesh, gather_per_block=remat.gather_per_block, casts=not wide
        ),
        pins={v: sharding for v, sharding in shardings.items() if v not in skipped},
    )


def weight_uses(
    traced: TracedLoss, gathers: Mapping[int, GatherSpecs], whole: Sequence[PartitionSpec]
) -> dict[Var, WeightUse]:
    """Find the variables that are parameters: the leaves and their casts.

    Args:
        traced: the loss.
        gathers: by number of the step leaf, the layouts of weights divided over fsdp.
        whole: by number of the step leaf, its layout when gathered.
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
