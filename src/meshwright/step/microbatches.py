"""States with a row for each sample of a batch, which microbatches divide."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import jax

from meshwright.errors import MeshwrightError, Setting, UserError, first_line
from meshwright.plan import Plan
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.traced_loss import Loss, trace_loss
from meshwright.text.units import counted
from meshwright.trees import Batch, resize_batch

_KEY = "training.gradient_accumulation_steps"


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


def refuse_repeated_samples(
    loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan
) -> None:
    """Refuse microbatches of one sample for states with a row for each sample of a batch.

    The sample would be repeated for all rows, without an error.
    """
    size = jax.tree.leaves(micro)[0].shape[0]
    if plan.batch.gradient_accumulation_steps > 1 == size and _states(model_leaves, plan):
        try:
            trace_loss(loss, model_leaves, resize_batch(micro, 2))
        except Exception as error:
            raise _needs_whole_batch(model_leaves, plan, first_line(error)) from error


def _needs_whole_batch(model_leaves: ModelLeaves, plan: Plan, message: str) -> UserError:
    batch, states = plan.batch, _states(model_leaves, plan)
    count = batch.gradient_accumulation_steps
    each = counted(batch.global_batch_size // count, "sample")
    named = f", and `{states[0]}` has a row for each of them" if states else ""
    staged = " of the pipeline" if plan.size("pipe") > 1 else ""
    return UserError(
        f"the loss cannot be computed for a microbatch of {each}: {message}",
        why=f"the {count} microbatches{staged} divide the {batch.global_batch_size} samples of a "
        f"batch{named}",
        fix=f"write {'a mesh without pipe' if staged else Setting(_KEY, 1)}, or a model that "
        "takes any number of samples",
    )


def _states(model_leaves: ModelLeaves, plan: Plan) -> list[str]:
    """Return the paths of states with a row for each sample of a batch."""
    size = plan.batch.global_batch_size
    return [
        leaf.path
        for leaf in model_leaves.leaves
        if leaf.role == "state" and leaf.struct.shape[:1] == (size,)
    ]
