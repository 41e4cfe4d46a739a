"""Placements for a pipeline: each stage holds the rows of its own blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh

from meshwright.config.schema import ShardingConfig
from meshwright.mesh.axes import PIPE
from meshwright.pipeline.divide.block_cut import BlockCut
from meshwright.pipeline.divide.division import divide_blocks
from meshwright.pipeline.divide.stages import StageContext
from meshwright.pipeline.execute.pipelined_loss import PipelinedLoss
from meshwright.pipeline.schedule.schedules import get_schedule
from meshwright.plan import Plan
from meshwright.program.kernels.find_kernels import KernelSearch
from meshwright.program.on_mesh.mesh_forward import LocalDraws, ProgramLayouts
from meshwright.program.on_mesh.remat import Remat
from meshwright.sharding.decide import Decision, batch_axes, decide, gather_specs
from meshwright.sharding.placement import Placement, on_each_stage


def decide_stages(
    cut: BlockCut,
    sizes: Mapping[str, int],
    sharding: ShardingConfig,
    num_chunks: int,
    search: KernelSearch | None = None,
) -> Decision:
    """Decide the placement of every leaf: blocks on their stages, others sharded over all."""
    staged = [stack.number for stack in cut.stacks]
    decision = decide(cut.traced, sizes, sharding, staged=staged, search=search)
    at_rest = place_on_stages(cut, decision.at_rest, sizes[PIPE], num_chunks)
    return replace(
        decision,
        at_rest=at_rest,
        optimizer=place_on_stages(cut, decision.optimizer, sizes[PIPE], num_chunks),
        gradients=place_on_stages(cut, decision.gradients, sizes[PIPE], num_chunks),
        gathers=gather_specs(decision.gathers, at_rest),
    )


def place_on_stages(
    cut: BlockCut, placements: Sequence[Placement], num_stages: int, num_chunks: int
) -> tuple[Placement, ...]:
    """Return placements with the rows of blocks sharded over the stages."""
    division = divide_blocks(cut.num_blocks, num_stages, num_chunks)
    reason = on_each_stage(division.most * num_chunks, even=division.even)
    numbers = {stack.number for stack in cut.stacks}
    return tuple(
        replace(
            placement,
            dims=((PIPE, *placement.dims[0]), *placement.dims[1:]),
            reasons=(reason, *placement.reasons),
        )
        if number in numbers
        else placement
        for number, placement in enumerate(placements)
    )


def pipelined_loss(
    cut: BlockCut,
    decision: Decision,
    plan: Plan,
    mesh: Mesh,
    *,
    remat: Remat,
    wide: bool,
    per_device: BlockCut | None = None,
) -> PipelinedLoss:
    """Return the loss and its gradients, computed in the plan's pipeline stages.

    ``per_device`` is the loss of one device's samples, if gradients are reduced once per step.
    """
    schedule = get_schedule(plan.schedule or "1f1b", plan.num_chunks)
    schedule.shape(plan.num_microbatches, plan.size(PIPE))
    inside, draws = decision, None
    if per_device is not None:
        # No batch axis shards the samples of one device.
        axes = batch_axes(plan.mesh)
        others = {axis: size for axis, size in plan.mesh.items() if axis not in axes}
        unsharded = plan.sharding.model_copy(update={"zero": 1})
        inside = decide_stages(per_device, others, unsharded, plan.num_chunks, decision.search)
        draws = LocalDraws(decision.classes, inside.classes, axes)
    context = replace(stage_context(inside, mesh, remat, wide=wide), draws=draws)
    return PipelinedLoss(
        cut,
        context,
        schedule,
        plan.num_microbatches,
        sums=[placement.without(PIPE) for placement in inside.gradients],
        gradients=decision.gradients,
        per_device=per_device,
    )


def stage_context(decision: Decision, mesh: Mesh, remat: Remat, *, wide: bool) -> StageContext:
    """Return the layouts inside the pipeline, without the pipe axis."""
    return StageContext(
        mesh=mesh,
        layouts=ProgramLayouts(
            activations=decision.activations, weights=decision.weights, kernels=decision.kernels
        ),
        gathers=gather_specs(decision.gathers, decision.at_rest, PIPE),
        whole=[placement.without("fsdp", PIPE) for placement in decision.at_rest],
        remat=remat,
        wide=wide,
    )
