"""The program of a step: the loss of one microbatch, traced, rolled and cut as the plan asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from meshwright.errors import UserError
from meshwright.pipeline.cut import BlockCut, cut_blocks, ordered_by_stage
from meshwright.plan import Plan
from meshwright.program.apart import check_mean
from meshwright.program.parts import Parts
from meshwright.program.policy import COMPUTE_DTYPES
from meshwright.program.rolled import roll_program
from meshwright.program.trace import Loss, TracedLoss, trace_loss
from meshwright.sharding.decide import batch_axes, dim_classes
from meshwright.trees import divide_batch, resize_batch


@dataclass(frozen=True)
class StepProgram:
    """A loss as a step evaluates it.

    Attributes:
        traced: the loss, traced for the samples it was asked for.
        cut: where it is cut into stages; None without stages.
        remarks: what could not be done as the plan asked, and why.
    """

    traced: TracedLoss
    cut: BlockCut | None
    remarks: tuple[str, ...]


def step_program(
    loss: Loss, parts: Parts, samples: Any, plan: Plan, *, staged: bool = True
) -> StepProgram:
    """Trace a loss for samples of these shapes; ``staged=False`` leaves stages out."""
    traced = trace_loss(loss, parts, samples, COMPUTE_DTYPES[plan.precision])
    stages = plan.size("pipe") if staged else 1
    if stages == 1 and plan.sharding.blocks != "scan":
        return StepProgram(traced, None, ())
    rolled = roll_program(traced)
    if stages == 1:
        return StepProgram(rolled.traced, None, rolled.remarks)
    cut = ordered_by_stage(cut_blocks(rolled.traced, rolled.remarks), stages, plan.num_chunks)
    return StepProgram(cut.traced, cut, rolled.remarks)


def own_program(loss: Loss, parts: Parts, micro: Any, plan: Plan) -> StepProgram | None:
    """Return the loss of one device's part of a microbatch, if gradients are added up there.

    None where they are of the whole microbatch: where each is reduced, or each device has all.
    """
    axes = batch_axes(plan.mesh)
    if plan.batch.sync_gradients_every == 1 or not axes:
        return None
    if plan.sharding.zero > 1 and "fsdp" in axes:
        raise UserError(
            f"sync_gradients_every={plan.batch.sync_gradients_every} needs whole gradients",
            why=f"sharding.zero={plan.sharding.zero} divides gradients over fsdp={axes['fsdp']}",
            fix="write sharding.zero=1 or training.sync_gradients_every=1",
        )
    own = divide_batch(micro, plan.batch.replicas)
    _check_mean(loss, parts, micro, plan)
    return step_program(loss, parts, own, plan)


def _check_mean(loss: Loss, parts: Parts, micro: Any, plan: Plan) -> None:
    """Refuse a loss that devices cannot take of their own samples."""
    twice = resize_batch(micro, 2 * jax.tree.leaves(micro)[0].shape[0])
    compute = COMPUTE_DTYPES[plan.precision]
    first, second = (trace_loss(loss, parts, samples, compute) for samples in (micro, twice))
    check_mean(dim_classes(first), dim_classes(second), first.metric_names)
