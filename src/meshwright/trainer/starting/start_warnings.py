"""Warnings shown when a run starts."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.checkpoint import CheckpointMetadata
from meshwright.config.batch import Batch
from meshwright.program.trace.model_leaves import Leaf
from meshwright.text.units import counted


def repeated_samples(batch_size: int, num_samples: int | None) -> list[str]:
    """Warn if a batch holds more samples than there are."""
    if num_samples is None or batch_size <= num_samples:
        return []
    return [
        f"a batch of {batch_size} samples repeats each of the {num_samples} samples "
        f"{batch_size / num_samples:.3g} times on average; use a batch of at most {num_samples} to "
        "repeat none"
    ]


def other_microbatches(
    metadata: CheckpointMetadata, batch: Batch, leaves: Iterable[Leaf]
) -> list[str]:
    """Warn if dropout or statistics depend on the number of microbatches, and it has changed."""
    before = metadata.plan.get("batch", {}).get("gradient_accumulation_steps")
    now = batch.gradient_accumulation_steps
    if before in (None, now) or all(leaf.role == "param" for leaf in leaves):
        return []
    warning = (
        f"an update had {counted(before, 'microbatch', 'microbatches')} before the checkpoint and "
        f"has {now} now, which changes dropout and batch statistics"
    )
    size, most = batch.global_batch_size, batch.global_batch_size // before
    if size % (before * batch.replicas) == 0:
        return [f"{warning}; gradient_accumulation_steps={before} keeps them"]
    if size % before == 0:
        return [
            f"{warning}; gradient_accumulation_steps={before} would keep them on a mesh whose "
            f"data × fsdp divides {most}, which {batch.replicas} does not"
        ]
    return [warning]
