"""A mesh inside or outside of a `jax.shard_map`: which axes the compiler may divide over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class MeshView:
    """A mesh, outside or inside of a `jax.shard_map`.

    Attributes:
        mesh: the whole mesh.
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
        """The axes that the compiler divides arrays over, and their sizes."""
        sizes = self.mesh.shape.items()
        return {axis: size for axis, size in sizes if axis not in self.manual_axes}

    @cached_property
    def num_auto(self) -> int:
        """The number of devices that the compiler divides arrays over."""
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
