"""Running a kernel on each device's own part of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.program.evaluate.mesh_view import MeshView


def axes_of(specs: Sequence[PartitionSpec | None]) -> set[str]:
    """Return the mesh axes that specs name."""
    entries = [entry for spec in specs for entry in spec or () if entry is not None]
    return {a for entry in entries for a in ((entry,) if isinstance(entry, str) else entry)}


def run_locally(
    run: Callable[..., Any],
    operands: Sequence[Any],
    specs: Sequence[PartitionSpec | None],
    out: Any,
    mesh: MeshView,
) -> Any:
    """Run a function on each device's part of the operands, or as it is where none is divided.

    Args:
        run: a function of the operands.
        operands: whole arrays.
        specs: how each operand is divided.
        out: how the results are divided.
        mesh: where it runs.
    """
    axes = axes_of(specs) - mesh.manual_axes
    if not axes:
        return run(*operands)
    return jax.shard_map(
        run,
        mesh=mesh.for_constraints,
        in_specs=tuple(spec or PartitionSpec() for spec in specs),
        out_specs=out,
        axis_names=axes,
        check_vma=False,
    )(*operands)
