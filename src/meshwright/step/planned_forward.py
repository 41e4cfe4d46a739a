"""The forward pass of a traced loss with the placements of a plan."""

from __future__ import annotations

from jax.sharding import Mesh

from meshwright.plan import Plan
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.kernels.find_kernels import KernelSearch
from meshwright.program.on_mesh.mesh_forward import Forward, mesh_evaluator, weight_uses
from meshwright.program.on_mesh.remat import Remat, choose_remat
from meshwright.program.trace.traced_loss import TracedLoss
from meshwright.sharding.decide import Decision


def planned_forward(
    traced: TracedLoss, decision: Decision, plan: Plan, mesh: Mesh, *, wide: bool = False
) -> Forward:
    """Return the loss on the mesh with the decided placements; ``wide`` computes in float64."""
    return forward_on(traced, decision, MeshView(mesh), planned_remat(decision, plan), wide=wide)


def forward_on(
    traced: TracedLoss, decision: Decision, view: MeshView, remat: Remat, *, wide: bool = False
) -> Forward:
    """Return the loss on a mesh with the decided placements and this rematerialization."""
    whole = [placement.without("fsdp") for placement in decision.at_rest]
    evaluator = mesh_evaluator(
        view,
        weight_uses(traced, decision.gathers, whole),
        remat,
        wide=wide,
        constraints=decision.pins,
        local_ops=decision.local_ops,
        shared_inputs=decision.shared_inputs,
        loop_reads=decision.loop_reads,
        weight_only=decision.weights,
        kernels=decision.kernels,
    )
    return Forward(traced, evaluator, remat)


def kernel_search(plan: Plan, mesh: Mesh) -> KernelSearch:
    """Return which kernels the plan asks for on the devices of the mesh."""
    return KernelSearch(
        plan.kernels,
        platform=mesh.devices.flat[0].platform,
        # Where tensor divides products, joined rows would keep the compiler from adding the
        # gradients of query, key and value before it reduces them.
        rows=plan.size("tensor") == 1,
    )


def planned_remat(decision: Decision, plan: Plan) -> Remat:
    """Return the rematerialization of the plan: what blocks save for the backward pass."""
    keep = plan.sharding.keep_gathered or not decision.gathers
    return choose_remat(plan.sharding.remat, keep_gathered=keep)
