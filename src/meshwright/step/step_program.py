"""The program of a step: the loss of one microbatch, traced, rolled, cut into stages, on a mesh."""

import math
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh, PartitionSpec

from meshwright.errors import Setting, UserError
from meshwright.mesh.axes import CONTEXT, TENSOR
from meshwright.pipeline.divide.block_cut import BlockCut
from meshwright.pipeline.divide.cut import cut_blocks, ordered_by_stage
from meshwright.pipeline.place import decide_stages
from meshwright.plan import Plan
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.dims.sample_mean import check_mean
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.kernels.find_kernels import KernelSearch, find_kernels, unsharded
from meshwright.program.on_mesh.mesh_forward import (
    Forward,
    LocalDraws,
    ProgramLayouts,
    mesh_evaluator,
    weight_uses,
)
from meshwright.program.on_mesh.remat import Remat, choose_remat
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, TracedLoss, trace_loss
from meshwright.sharding.decide import Decision, batch_axes, decide, dim_classes
from meshwright.trees import Batch, divide_batch, resize_batch


@dataclass(frozen=True)
class StepProgram:
    """A loss as a step evaluates it, cut into stages if there are any."""

    traced: TracedLoss
    cut: BlockCut | None
    remarks: tuple[str, ...]


def step_program(
    loss: Loss, model_leaves: ModelLeaves, samples: Batch, plan: Plan, *, staged: bool = True
) -> StepProgram:
    """Trace a loss for samples of these shapes; ``staged=False`` ignores pipeline stages."""
    traced = trace_loss(loss, model_leaves, samples, COMPUTE_DTYPES[plan.precision])
    stages = plan.size("pipe") if staged else 1
    if stages == 1:
        program = unstaged_program(traced, plan)
        return replace(program, remarks=(*traced.remarks, *program.remarks))
    _refuse_written(traced, stages)
    rolled = roll_program(traced, even_connections=True)
    cut = ordered_by_stage(cut_blocks(rolled.traced, rolled.remarks), stages, plan.num_chunks)
    return StepProgram(cut.traced, cut, (*traced.remarks, *rolled.remarks))


def _refuse_written(traced: TracedLoss, stages: int) -> None:
    if not traced.written:
        return
    paths = [traced.leaves[number].path for number in traced.written]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    raise UserError(
        f"the model writes to the parameter `{paths[0]}`{more} in its call, and cannot be divided "
        "into stages",
        why="each stage has several microbatches in flight, and all of them must read the same "
        "parameters",
        fix=f"leave out {Setting('mesh.pipe', stages)}, or compute the value in the call without "
        "writing it to the parameter",
    )


def unstaged_program(traced: TracedLoss, plan: Plan) -> StepProgram:
    """Return a traced program without pipeline stages, rolled if the plan asks for it."""
    if plan.sharding.blocks != "scan":
        return StepProgram(traced, None, ())
    rolled = roll_program(traced)
    return StepProgram(rolled.traced, None, rolled.remarks)


def per_device_program(
    loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan, mesh: Mesh
) -> StepProgram | None:
    """Return the loss of one device's samples, if each device computes its own gradients.

    None if the compiler shards the whole microbatch instead, or if no mesh axis does.
    """
    axes = batch_axes(plan.mesh)
    if not axes:
        return None
    if plan.batch.sync_gradients_every == 1:
        whole_model_everywhere = math.prod(plan.mesh.values()) == plan.size("data")
        if sends_through_gloo(mesh) and whole_model_everywhere:
            return _if_possible(loss, model_leaves, micro, plan)
        return None
    if plan.sharding.zero > 1 and "fsdp" in axes:
        raise UserError(
            f"{Setting('training.sync_gradients_every', plan.batch.sync_gradients_every)} needs "
            "unsharded gradients",
            why=f"zero={plan.sharding.zero} shards gradients over fsdp={axes['fsdp']}",
            fix=f"write {Setting('sharding.zero', 1)} or "
            f"{Setting('training.sync_gradients_every', 1)}",
        )
    return _per_device(loss, model_leaves, micro, plan)


def sends_through_gloo(mesh: Mesh) -> bool:
    """Whether gradients cross processes on CPUs, where each array costs milliseconds to send.

    It pays to send all of them as one array, for which each device has to compute its own.
    """
    return mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"


def _if_possible(
    loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan
) -> StepProgram | None:
    """Return the loss of one device's samples; None if it needs all samples of the microbatch."""
    try:
        program = _per_device(loss, model_leaves, micro, plan)
        whole = trace_loss(loss, model_leaves, micro, COMPUTE_DTYPES[plan.precision])
        LocalDraws(dim_classes(whole), dim_classes(program.traced), batch_axes(plan.mesh))
    except Exception:  # A model may refuse this number of samples in its own way.
        return None
    return program


def _per_device(loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan) -> StepProgram:
    """Return the loss of one device's samples; raise unless it is a mean over samples."""
    twice = resize_batch(micro, 2 * jax.tree.leaves(micro)[0].shape[0])
    compute = COMPUTE_DTYPES[plan.precision]
    first, second = (trace_loss(loss, model_leaves, samples, compute) for samples in (micro, twice))
    check_mean(dim_classes(first), dim_classes(second), first.metric_names, first.kept_paths)
    return step_program(loss, model_leaves, divide_batch(micro, plan.batch.replicas), plan)


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
    uses = weight_uses(traced, decision.gathers, whole)
    evaluator = mesh_evaluator(view, uses, remat, decision, wide=wide)
    return Forward(traced, evaluator, remat, decision.kernels)


def local_forward(
    traced: TracedLoss, decision: Decision, plan: Plan, mesh: Mesh, *, wide: bool
) -> Forward:
    """Return the loss of one device's samples, inside a `jax.shard_map` over the batch axes.

    Inside there is only this device, so nothing is sharded.
    """
    classes = dim_classes(traced)
    draws = LocalDraws(decision.classes, classes, batch_axes(plan.mesh))
    remat = choose_remat(plan.sharding.remat, keep_gathered=True)
    kernels = find_kernels(traced, classes, unsharded, kernel_search(plan, mesh))
    evaluator = mesh_evaluator(
        MeshView(mesh, frozenset(draws.batch_axes)),
        weight_uses(traced, {}, [PartitionSpec()] * len(traced.layout.step_leaves)),
        remat,
        ProgramLayouts(kernels=kernels),
        wide=wide,
        first=[draws.draw],
        lookups=False,
    )
    return Forward(traced, evaluator, remat, kernels)


def kernel_search(plan: Plan, mesh: Mesh) -> KernelSearch:
    """Return which kernels the plan asks for on the devices of the mesh."""
    return KernelSearch(
        plan.kernels,
        platform=mesh.devices.flat[0].platform,
        # Where tensor shards products, joined rows would keep the compiler from adding the
        # gradients of query, key and value before it reduces them.
        # Nor can rows whose samples and positions are both sharded be joined without sending them.
        rows=plan.size(TENSOR) == plan.size(CONTEXT) == 1,
        sparing=plan.sharding.remat != "none",
    )


def decide_program(program: StepProgram, plan: Plan, mesh: Mesh) -> Decision:
    """Decide how the plan places a program, on the whole mesh or in its stages."""
    search = kernel_search(plan, mesh)
    if program.cut is None:
        return decide(program.traced, plan.mesh, plan.sharding, search=search)
    return decide_stages(program.cut, plan.mesh, plan.sharding, plan.num_chunks, search)


def planned_remat(decision: Decision, plan: Plan) -> Remat:
    """Return the rematerialization of the plan: what blocks save for the backward pass."""
    keep = plan.sharding.keep_gathered or not decision.gathers
    return choose_remat(plan.sharding.remat, keep_gathered=keep)
