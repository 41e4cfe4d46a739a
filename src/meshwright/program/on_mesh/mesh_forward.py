"""The traced loss on a mesh: weights gathered, activations pinned, blocks rematerialized."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import PartitionSpec

from meshwright.program.blocks.segments import Unit, cut
from meshwright.program.blocks.to_scan import casts_of
from meshwright.program.evaluate.evaluator import Environment, Evaluator, Rule
from meshwright.program.evaluate.gather import GatherSpecs
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.evaluate.weights import Weights, WeightUse
from meshwright.program.evaluate.widen import Float64, widen_derivatives
from meshwright.program.jaxpr.equations import Value, Var, aval_of
from meshwright.program.on_mesh.mesh_rules import (
    GroupedConvolutions,
    LayerScans,
    WeightGradients,
    add_weight,
    cast_leaf,
    rearrange_weight,
)
from meshwright.program.on_mesh.remat import Remat
from meshwright.program.trace.traced_loss import LossValue, TracedLoss


class Forward:
    """The loss as a function of the step's leaves and a batch, on a mesh.

    Args:
        traced: the traced loss.
        evaluator: evaluates it on the mesh.
        remat: what blocks keep for their backward pass.
    """

    def __init__(self, traced: TracedLoss, evaluator: Evaluator, remat: Remat) -> None:
        self.traced, self._evaluator, self._remat = traced, evaluator, remat
        self._pieces = cut(traced.closed.jaxpr)

    def __call__(self, leaves: Sequence[Value], batch: Sequence[Value]) -> LossValue:
        """Evaluate the loss on the step's leaf values (in layout order) and batch leaves."""
        return self.traced.read_outputs(self.outputs(leaves, batch))

    def outputs(self, leaves: Sequence[Value], batch: Sequence[Value]) -> list[Value]:
        """Return the program's outputs as they are: its results, then the new state."""
        closed = self.traced.closed
        env = self._evaluator.environment(closed, [*leaves, *batch])
        for piece in self._pieces:
            if isinstance(piece, Unit) and self._remat.policy is not None:
                self._run_block(piece, env)
            else:
                self._evaluator.equations(piece.eqns, env)
        return [env.value(atom) for atom in closed.jaxpr.outvars]

    def _run_block(self, block: Unit, env: Environment) -> None:
        """Evaluate a block under its checkpoint policy."""
        uses, inside = env.evaluator.weights.uses, self._remat.gather_inside
        arguments = [
            env.value(v)
            if v not in uses
            else env.values[uses[v].leaf]
            if inside
            else env.unrounded(v)
            for v in block.reads
        ]

        def run(*values: Value) -> list[Value]:
            inner, ready = dict[Var, Value](), dict[Var, Value]()
            for variable, value in zip(block.reads, values, strict=True):
                if variable not in uses:
                    inner[variable] = value
                elif inside:
                    inner[uses[variable].leaf] = value
                else:
                    ready[variable] = value
            self._evaluator.equations(block.eqns, Environment(self._evaluator, inner, ready))
            return [inner[v] for v in block.results]

        results = jax.checkpoint(run, policy=self._remat.policy)(*arguments)
        env.values.update(zip(block.results, results, strict=True))


def mesh_evaluator(
    mesh: MeshView,
    uses: Mapping[Var, WeightUse],
    remat: Remat,
    *,
    wide: bool,
    pins: Mapping[Var, PartitionSpec] | None = None,
    without_data: Collection[Var] = (),
    first: Sequence[Rule] = (),
    lookups: bool = True,
) -> Evaluator:
    """Return an evaluator of a program on a mesh.

    Args:
        mesh: where it runs.
        uses: the variables that stand for parameters.
        remat: what layers of a stack keep for their backward pass.
        wide: compute in float64.
        pins: layouts of activations.
        without_data: variables that hold weights and no data.
        first: rules that come before those of any mesh.
        lookups: whether the gradients of lookups need a layout.
    """
    rules = [
        *first,
        cast_leaf,
        GroupedConvolutions(mesh),
        rearrange_weight,
        WeightGradients(mesh, lookups),
        add_weight,
        LayerScans(remat),
    ]
    return Evaluator(
        [*rules, widen_derivatives] if wide else rules,
        numerics=Float64() if wide else None,
        weights=Weights(
            uses, without_data, mesh, gather_inside=remat.gather_inside, rounds=not wide
        ),
        pins={variable: mesh.sharding(spec) for variable, spec in (pins or {}).items()},
    )


def weight_uses(
    traced: TracedLoss, gathers: Mapping[int, GatherSpecs], whole: Sequence[PartitionSpec]
) -> dict[Var, WeightUse]:
    """Find the variables that stand for parameters: the leaves and their casts.

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
    return uses | {
        other: replace(uses[leaf], dtype=aval_of(other).dtype) for other, leaf in casts.items()
    }
