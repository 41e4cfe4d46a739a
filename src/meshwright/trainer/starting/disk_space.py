"""Disk space for checkpoints, checked before anything is compiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax

from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main
from meshwright.step.canonical import CanonicalState
from meshwright.text.units import counted, human_bytes


def check_disk_space(folder: Path, structs: CanonicalState, *, most: int, present: int) -> str:
    """Refuse a disk without room for a checkpoint; warn if it has none for all that are kept.

    Args:
        folder: where checkpoints are written; it exists.
        structs: the shapes and types of their arrays.
        most: how many there are at most, with the one that is being written.
        present: how many there are already.

    Returns:
        a warning; empty if there is room.
    """
    needed = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(structs))
    # Process 0 answers for all of them, so that they go on or end together.
    free = int(broadcast(shutil.disk_usage(folder).free if is_main() else 0))
    if free < needed:
        raise UserError(
            f"there is no room for a checkpoint in {folder}",
            why=f"it takes {human_bytes(needed)}, and {human_bytes(free)} are free",
            fix=f"free disk space, write {Setting('hydra.run.dir', ANY)} with a folder on another "
            f"disk, or {Setting('checkpoint.enabled', False)}",
        )
    more = max(most - present, 1)
    if free >= more * needed:
        return ""
    return (
        f"the disk may get full: up to {counted(more, 'more checkpoint')} of {human_bytes(needed)} "
        f"will be in {folder}, where {human_bytes(free)} are free; "
        f"{Setting('checkpoint.keep_last', 1)} keeps fewer"
    )
