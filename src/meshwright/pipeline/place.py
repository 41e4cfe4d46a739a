"""Where a pipeline's leaves live: each stage holds the rows of its own blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from meshwright.config.schema import ShardingConfig
from meshwright.mesh.axes import PIPE
from meshwright.pipeline.divide.block_cut import BlockCut
from meshwright.pipeline.divide.context import StageContext
from meshwright.pipeline.divide.division import divide_blocks
from meshwright.pipeline.execute.forward_only import PipelinedForward
from meshwright.pipeline.execute.pipelined_loss import PipelinedLoss
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.program.evaluate.gather import GatherSpecs
from meshwright.program.on_mesh.local_forward import LocalDraws
from meshwright.program.on_mesh.remat import Remat
from meshwright.sharding.decide import Decision, batch_axes, decide
from meshwright.sharding.placement import Placement
from meshwright.sharding.reasons import OnEachStage


def decide_stages(
    cut: BlockCut, sizes: Mapping[str, int], sharding: ShardingConfig, num_chunks: int
) -> Decision:
    """Decide where every leaf lives: blocks on their stages, the rest divided over all of them."""
    decision = decide(cut.traced, sizes, sharding, staged=[stack.number for stack in cut.stacks])
    division = divide_blocks(cut.num_blocks, sizes[PIPE], num_chunks)
    held = OnEachStage(division.most * num_chunks, division.even)
    numbers = {stack.number for stack in cut.stacks}

    def divide(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(
            _on_pipe(placement, held) if number in numbers else placement
            for number, placement in enumerate(placements)
        )

    at_rest = divide(decision.at_rest)
    return replace(
        decision,
        at_rest=at_rest,
        optimizer=divide(decision.optimizer),
        gradients=divide(decision.gradients),
        gathers={
            number: GatherSpecs(at_rest[number].without("fsdp"), at_rest[number].spec)
            for number in decision.gathers
        },
    )


@dataclass(frozen=True)
class OwnSamples:
    """The loss of one device's samples, for stages that reduce gradients once per update.

    Attributes:
        cut: the loss and where it is cut, rows in the order of stages.
        decision: where everything lives among the devices that have the same samples.
        draws: its random numbers.
    """

    cut: BlockCut
    decision: Decision
    draws: LocalDraws


def decide_own(
    cut: BlockCut,
    decision: Decision,
    sizes: Mapping[str, int],
    sharding: ShardingConfig,
    num_chunks: int,
) -> OwnSamples:
    """Decide where the loss of one device's samples lives: only other axes divide anything.

    Args:
        cut: the loss of one device's samples.
        decision: where everything lives in the loss of a whole microbatch.
        sizes: axis sizes of the mesh.
        sharding: what the user wants.
        num_chunks: pieces of the model on each stage.
    """
    axes = batch_axes(sizes)
    others = {axis: size for axis, size in sizes.items() if axis not in axes}
    whole = sharding.model_copy(update={"zero": 1})
    own = decide_stages(cut, others, whole, num_chunks)
    return OwnSamples(cut, own, LocalDraws(decision.classes, own.classes, axes))


def pipelined_loss(
    cut: BlockCut,
    decision: Decision,
    mesh: Mesh,
    schedule: Schedule,
    num_microbatches: int,
    *,
    remat: Remat,
    wide: bool,
    own: OwnSamples | None = None,
) -> PipelinedLoss:
    """Return the loss and its gradients as a pipeline on the mesh.

    Args:
        cut: the loss and where it is cut, rows in the order of stages.
        decision: where everything lives, stacks divided over the stages.
        mesh: where.
        schedule: when each stage does what.
        num_microbatches: microbatches between two flushes.
        remat: what blocks keep for their backward pass.
        wide: compute in float64, for proofs.
        own: the same for one device's samples, whose gradients are reduced once per update.
    """
    inside = decision if own is None else own.decision
    where = _one_stage(inside, mesh, remat, wide=wide)
    sums = [placement.without(PIPE) for placement in inside.gradients]
    if own is None:
        return PipelinedLoss(cut, where, schedule, num_microbatches, sums)
    where = replace(where, draws=own.draws)
    return PipelinedLoss(cut, where, schedule, num_microbatches, sums, own.cut)


def pipelined_forward(
    cut: BlockCut, decision: Decision, mesh: Mesh, num_chunks: int, *, remat: Remat
) -> PipelinedForward:
    """Return the loss alone as a pipeline on the mesh; see `pipelined_loss`."""
    return PipelinedForward(cut, _one_stage(decision, mesh, remat, wide=False), num_chunks)


def _one_stage(decision: Decision, mesh: Mesh, remat: Remat, *, wide: bool) -> StageContext:
    """Return what is asked for inside the pipeline: layouts without the pipe axis."""
    return StageContext(
        mesh=mesh,
        pins=decision.pins,
        weights=decision.weights,
        gathers={
            number: GatherSpecs(
                decision.at_rest[number].without("fsdp", PIPE),
                decision.at_rest[number].without(PIPE),
            )
            for number in decision.gathers
        },
        whole=[placement.without("fsdp", PIPE) for placement in decision.at_rest],
        remat=remat,
        wide=wide,
    )


def _on_pipe(placement: Placement, held: OnEachStage) -> Placement:
    dims = ((PIPE, *placement.dims[0]), *placement.dims[1:])
    return Placement(placement.path, dims, (held, *placement.reasons))
