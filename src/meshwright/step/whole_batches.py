"""States with a row for each sample of a batch, which microbatches divide."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from meshwright.errors import MeshwrightError, Setting, UserError, first_line
from meshwright.plan import Plan
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.traced_loss import Loss, trace_loss
from meshwright.text.units import counted
from meshwright.trees import Batch, resize_batch


@contextmanager
def explaining_whole_batches(
    loss: Loss, leaves: ModelLeaves, batch: Batch, plan: Plan
) -> Generator[None]:
    """Explain the error of a loss that can be traced for a batch, but not for a microbatch."""
    count, size = plan.batch.gradient_accumulation_steps, plan.batch.global_batch_size
    rows = [x.path for x in leaves.leaves if x.role == "state" and x.struct.shape[:1] == (size,)]
    try:
        yield
        if count == size > 1 and rows:
            # A single sample would be repeated for all rows, without an error.
            trace_loss(loss, leaves, resize_batch(batch, 2))
    except Exception as error:
        if count == 1 or isinstance(error, MeshwrightError):
            raise
        try:
            trace_loss(loss, leaves, batch)
        except Exception:
            raise error from None
        staged = plan.size("pipe") > 1
        one = Setting("training.gradient_accumulation_steps", 1)
        raise UserError(
            f"the loss cannot be computed for a microbatch of {counted(size // count, 'sample')}: "
            f"{first_line(error)}",
            why=f"the {count} microbatches{' of the pipeline' if staged else ''} divide the {size} "
            "samples of a batch"
            + (f", and `{rows[0]}` has a row for each of them" if rows else ""),
            fix=f"write {'a mesh without pipe' if staged else one}, or a model that takes any "
            "number of samples",
        ) from error
