"""The program of a step: the loss of one microbatch, traced, rolled and cut into stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from meshwright.errors import Setting, UserError
from meshwright.pipeline.divide.block_cut import BlockCut
from meshwright.pipeline.divide.cut import cut_blocks, ordered_by_stage
from meshwright.plan import Plan
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.dims.sample_mean import check_mean
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, TracedLoss, trace_loss
from meshwright.sharding.decide import batch_axes, dim_classes
from meshwright.trees import Batch, divide_batch, resize_batch


@dataclass(frozen=True)
class StepProgram:
    """A loss as a step evaluates it.

    Attributes:
        traced: the traced loss.
        cut: the cut into stages; None without stages.
        remarks: where the program differs from what the plan asked for, and why.
    """

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
    rolled = roll_program(traced, evenly_joined=True)
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
        why="each stage has several microbatches under way, and all of them must read the same "
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
    loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan
) -> StepProgram | None:
    """Return the loss of one device's samples, if gradients accumulate on each device.

    None if every microbatch is reduced, or if no mesh axis divides the batch.
    """
    axes = batch_axes(plan.mesh)
    if plan.batch.sync_gradients_every == 1 or not axes:
        return None
    if plan.sharding.zero > 1 and "fsdp" in axes:
        raise UserError(
            f"{Setting('training.sync_gradients_every', plan.batch.sync_gradients_every)} needs "
            "unsharded gradients",
            why=f"zero={plan.sharding.zero} shards gradients over fsdp={axes['fsdp']}",
            fix=f"write {Setting('sharding.zero', 1)} or "
            f"{Setting('training.sync_gradients_every', 1)}",
        )
    samples = divide_batch(micro, plan.batch.replicas)
    _check_mean(loss, model_leaves, micro, plan)
    return step_program(loss, model_leaves, samples, plan)


def _check_mean(loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan) -> None:
    """Raise unless the loss is a mean over samples, which devices can compute independently."""
    twice = resize_batch(micro, 2 * jax.tree.leaves(micro)[0].shape[0])
    compute = COMPUTE_DTYPES[plan.precision]
    first, second = (trace_loss(loss, model_leaves, samples, compute) for samples in (micro, twice))
    names = first.metric_names
    check_mean(dim_classes(first), dim_classes(second), names, first.kept_paths)
