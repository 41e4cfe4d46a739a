"""DeviceMeshManager: meshes with axes of any name, over the first devices of a list."""

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import jax
from jax.sharding import Mesh

from meshwright.errors import UserError
from meshwright.mesh.build import Device, arrange_mesh

MeshShape = Mapping[str, int] | Sequence[tuple[str, int]]
"""Sizes of named axes, outermost first."""


class MeshInfo(TypedDict):
    """The number of devices and the axis sizes of a mesh."""

    total_devices: int
    axes: dict[str, int]


class DeviceMeshManager:
    """Creates meshes; a mesh of fewer devices than available uses the first ones."""

    def __init__(self, devices: Sequence[Device] | None = None) -> None:
        """Use these devices, by default all of JAX's."""
        self._devices = list(jax.devices() if devices is None else devices)

    @property
    def devices(self) -> list[Device]:
        """The devices that meshes are created from."""
        return list(self._devices)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self._devices)

    def create_device_mesh(
        self, mesh_shape: MeshShape, devices: Sequence[Device] | None = None
    ) -> Mesh:
        """Create a mesh from ``{"data": 4, "model": 2}`` or ``[("data", 4), ("model", 2)]``."""
        sizes = _checked_sizes(mesh_shape)
        available = self._devices if devices is None else list(devices)
        needed = math.prod(sizes.values())
        if needed > len(available):
            equation = " × ".join(f"{name}={size}" for name, size in sizes.items())
            raise UserError(
                f"Not enough devices: the mesh needs {needed} and there are {len(available)}",
                why=f"{equation} = {needed}" if len(sizes) > 1 else equation,
                fix=f"choose sizes whose product is at most {len(available)}",
            )
        return arrange_mesh(sizes, available[:needed])

    def create_data_parallel_mesh(
        self, num_devices: int | None = None, axis_name: str = "data"
    ) -> Mesh:
        """Create a mesh with one axis for data parallelism, over all devices by default."""
        return self._create_flat_mesh(num_devices, axis_name)

    def create_model_parallel_mesh(
        self, num_devices: int | None = None, axis_name: str = "model"
    ) -> Mesh:
        """Create a mesh with one axis for model parallelism, over all devices by default."""
        return self._create_flat_mesh(num_devices, axis_name)

    def create_hybrid_mesh(
        self,
        data_parallel_size: int = 1,
        model_parallel_size: int = 1,
        data_axis: str = "data",
        model_axis: str = "model",
    ) -> Mesh:
        """Create a mesh of data × model parallelism, with the model axis innermost."""
        return self.create_device_mesh(
            [(data_axis, data_parallel_size), (model_axis, model_parallel_size)]
        )

    def get_mesh_info(self, mesh: Mesh) -> MeshInfo:
        """Return ``{"total_devices": 8, "axes": {"data": 4, "model": 2}}``."""
        return {"total_devices": mesh.size, "axes": dict(mesh.shape)}

    def _create_flat_mesh(self, num_devices: int | None, axis_name: str) -> Mesh:
        size = self.num_devices if num_devices is None else num_devices
        return self.create_device_mesh([(axis_name, size)])


def _checked_sizes(mesh_shape: MeshShape) -> dict[str, int]:
    pairs = list(mesh_shape.items()) if isinstance(mesh_shape, Mapping) else list(mesh_shape)
    if not pairs:
        raise UserError("the mesh has no axes", fix='name at least one, such as {"data": 8}')
    for name, size in pairs:
        if size < 1:
            raise UserError(f"mesh axis `{name}` has size {size}", fix="write a size of 1 or more")
    sizes = dict(pairs)
    if len(sizes) < len(pairs):
        twice = next(name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1)
        raise UserError(f"mesh axis `{twice}` is given twice", fix="write each axis once")
    return sizes
