"""A mesh outside or inside of a `jax.shard_map`, and running code on each device's own part."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.mesh.axes import entry_names


@dataclass(frozen=True)
class MeshView:
    """A mesh, outside or inside of a `jax.shard_map`.

    Attributes:
        manual_axes: the axes of a `jax.shard_map` around the program.
        planned_for: the platform that a program is traced for, if another will run it.
    """

    mesh: Mesh
    manual_axes: frozenset[str] = frozenset()
    planned_for: str | None = None

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        return self.planned_for or self.mesh.devices.flat[0].platform

    @cached_property
    def auto_axes(self) -> dict[str, int]:
        """The axes that the compiler shards arrays over, and their sizes."""
        sizes = self.mesh.shape.items()
        return {axis: size for axis, size in sizes if axis not in self.manual_axes}

    @cached_property
    def num_auto(self) -> int:
        """The number of devices that the compiler shards arrays over."""
        return math.prod(self.auto_axes.values())

    @cached_property
    def for_constraints(self) -> Mesh | AbstractMesh:
        """The mesh to use in sharding constraints here."""
        if not self.manual_axes:
            return self.mesh
        return self.mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(self.manual_axes, AxisType.Manual)
        )

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of an array, for a constraint."""
        return NamedSharding(self.for_constraints, spec)


def axes_of(specs: Sequence[PartitionSpec | None]) -> set[str]:
    """Return the mesh axes that specs name."""
    return {axis for spec in specs for entry in spec or () for axis in entry_names(entry)}


def run_locally(
    run: Callable[..., Any],
    operands: Sequence[Any],
    specs: Sequence[PartitionSpec | None],
    out: Any,
    mesh: MeshView,
) -> Any:
    """Run a function on each device's part of the operands, or as it is where none is sharded.

    ``specs`` say how each operand is sharded, ``out`` how the results are.
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
