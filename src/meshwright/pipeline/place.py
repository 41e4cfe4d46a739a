"""Where a pipeline's leaves live: each stage holds the rows of its own blocks."""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from meshwright.pipeline.cut import BlockCut, blocks_per_stage
from meshwright.pipeline.gradients import AXIS, PipelinedLoss
from meshwright.pipeline.schedules import Schedule
from meshwright.pipeline.stages import Surroundings
from meshwright.program.gather import GatherSpecs
from meshwright.program.remat import Remat
from meshwright.sharding.decide import Decision
from meshwright.sharding.placement import Placement


def on_stages(decision: Decision, cut: BlockCut, num_stages: int, num_chunks: int) -> Decision:
    """Return a decision in which every stack of blocks is divided over the stages."""
    each = blocks_per_stage(cut.num_blocks, num_stages, num_chunks) * num_chunks
    numbers = set(cut.stacks)

    def divide(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(
            _on_pipe(placement, each) if number in numbers else placement
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


def pipelined_loss(
    cut: BlockCut,
    decision: Decision,
    mesh: Mesh,
    schedule: Schedule,
    num_microbatches: int,
    *,
    remat: Remat,
    wide: bool,
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
    """
    # Inside the pipeline there is only one stage: layouts without the pipe axis.
    where = Surroundings(
        mesh=mesh,
        pins=decision.pins,
        weights=decision.weights,
        gathers={
            number: GatherSpecs(
                decision.at_rest[number].without("fsdp", AXIS),
                decision.at_rest[number].without(AXIS),
            )
            for number in decision.gathers
        },
        whole=[placement.without("fsdp", AXIS) for placement in decision.at_rest],
        remat=remat,
        wide=wide,
    )
    sums = [placement.without(AXIS) for placement in decision.gradients]
    return PipelinedLoss(cut, where, schedule, num_microbatches, sums)


def _on_pipe(placement: Placement, each: int) -> Placement:
    blocks = "1 block" if each == 1 else f"{each} blocks"
    dims = ((AXIS, *placement.dims[0]), *placement.dims[1:])
    return Placement(placement.path, dims, f"{blocks} on each stage; {placement.reason}")
