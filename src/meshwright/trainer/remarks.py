"""What is worth saying of a run before it starts."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.checkpoint.store import Passport
from meshwright.config.batch import Batch
from meshwright.program.parts import Leaf
from meshwright.units import counted


def repeated_samples(batch_size: int, num_samples: int | None) -> list[str]:
    """Say so where every update sees the same samples more than once."""
    if num_samples is None or batch_size <= num_samples:
        return []
    return [
        f"a batch of {batch_size} samples holds each of the {num_samples} samples there are "
        f"{batch_size / num_samples:.3g} times on average; a batch of up to {num_samples} repeats "
        "none"
    ]


def other_microbatches(passport: Passport, batch: Batch, leaves: Iterable[Leaf]) -> list[str]:
    """Say so where random numbers or statistics go by microbatch and there are others now."""
    before = passport.plan.get("batch", {}).get("gradient_accumulation_steps")
    now = batch.gradient_accumulation_steps
    if before in (None, now) or all(leaf.role == "param" for leaf in leaves):
        return []
    found = (
        f"an update had {counted(before, 'microbatch', 'microbatches')} before the checkpoint and "
        f"has {now} now: dropout and batch statistics go on with other numbers"
    )
    size, most = batch.global_batch_size, batch.global_batch_size // before
    if size % (before * batch.replicas) == 0:
        return [f"{found}; gradient_accumulation_steps={before} keeps them"]
    if size % before == 0:
        return [
            f"{found}; gradient_accumulation_steps={before} would keep them on a mesh whose "
            f"data × fsdp divides {most}, which {batch.replicas} does not"
        ]
    return [found]
