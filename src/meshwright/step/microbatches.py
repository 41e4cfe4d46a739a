"""What dividing a batch into microbatches would change: states of a whole batch, and some losses.

A step averages the losses of its microbatches by their weights. That is the loss of the whole batch
if it is a mean over samples, or a ratio of sums given as `Weighted`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import jax

from meshwright.errors import MeshwrightError, Setting, UserError, first_line
from meshwright.plan import Plan
from meshwright.program.dims.sample_mean import find_mixing, not_a_mean
from meshwright.program.dims.sample_values import MixedSamplesError
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, TracedLoss, trace_loss
from meshwright.sharding.decide import dim_classes
from meshwright.text.units import counted
from meshwright.trees import Batch, resize_batch


@contextmanager
def explaining_whole_batches(
    loss: Loss, model_leaves: ModelLeaves, batch: Batch, plan: Plan
) -> Generator[None]:
    """Explain the error of a loss that can be traced for a whole batch, but not for a part."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        if plan.batch.gradient_accumulation_steps == 1:
            raise
        try:
            trace_loss(loss, model_leaves, batch)
        except Exception:
            raise error from None
        raise _needs_whole_batch(model_leaves, plan, first_line(error)) from error


def changed_by_microbatches(
    traced: TracedLoss, loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan
) -> list[str]:
    """Warn if a loss is not a mean over samples; refuse a state that fits no other microbatch.

    Args:
        traced: the loss of a microbatch, before any pass.
        loss: the loss.
        model_leaves: the model's leaves.
        micro: a microbatch.
        plan: the plan.
    """
    count = plan.batch.gradient_accumulation_steps
    if count == 1:
        return []
    classes = dim_classes(traced)
    twice = resize_batch(micro, 2 * jax.tree.leaves(micro)[0].shape[0])
    try:
        second = trace_loss(loss, model_leaves, twice, COMPUTE_DTYPES[plan.precision])
    except Exception as error:  # A model may refuse this number of samples in its own way.
        if _whole_batch_states(model_leaves, plan):
            # A single sample is repeated for all rows of a state without a word.
            raise _needs_whole_batch(model_leaves, plan, first_line(error)) from error
        mixing = find_mixing(classes)
    else:
        mixing = not_a_mean(classes, dim_classes(second))
    # Statistics of a microbatch are named by themselves, where they are of few samples.
    keeps = any(leaf.variable == "BatchStat" for leaf in model_leaves.leaves)
    if mixing is None or not mixing.combines or (keeps and mixing.module):
        return []
    return [_warning(mixing, plan)]


def _warning(mixing: MixedSamplesError, plan: Plan) -> str:
    count = plan.batch.gradient_accumulation_steps
    where = f" in `{mixing.module}`" if mixing.module else ""
    return (
        f"the loss is not a mean over samples{where}: {mixing}. A step averages the losses of its "
        f"{count} microbatches, which is not the loss of the whole batch. Return a mean over "
        "samples, or mw.Weighted(total, weight) of sums over them; or set "
        f"{Setting(_key(plan), 1)} for one microbatch"
    )


def _needs_whole_batch(model_leaves: ModelLeaves, plan: Plan, message: str) -> UserError:
    batch, states = plan.batch, _whole_batch_states(model_leaves, plan)
    count = batch.gradient_accumulation_steps
    each = counted(batch.global_batch_size // count, "sample")
    named = f", and `{states[0]}` has a row for each of them" if states else ""
    staged = " of the pipeline" if plan.size("pipe") > 1 else ""
    return UserError(
        f"the loss cannot be computed for a microbatch of {each}: {message}",
        why=f"the {count} microbatches{staged} divide the {batch.global_batch_size} samples of a "
        f"batch{named}",
        fix=f"write {'a mesh without pipe' if staged else Setting(_key(plan), 1)}, or a model that "
        "takes any number of samples",
    )


def _whole_batch_states(model_leaves: ModelLeaves, plan: Plan) -> list[str]:
    """Return the paths of states with a row for each sample of a batch."""
    size = plan.batch.global_batch_size
    return [
        leaf.path
        for leaf in model_leaves.leaves
        if leaf.role == "state" and leaf.struct.shape[:1] == (size,)
    ]


def _key(plan: Plan) -> str:
    staged = plan.size("pipe") > 1
    return "pipeline.num_microbatches" if staged else "training.gradient_accumulation_steps"
