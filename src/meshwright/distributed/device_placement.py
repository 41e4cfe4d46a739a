"""DevicePlacement: putting data on devices, and batch sizes that suit them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright.distributed.hardware_type import HardwareType
from meshwright.distributed.leaves import (
    check_mesh_axis,
    fit_sharding,
    place,
    place_parts,
    replicate,
)
from meshwright.distributed.prefetch import prefetch
from meshwright.errors import UserError
from meshwright.hardware import BatchSizeRecommendation
from meshwright.mesh.build import Device, arrange_mesh


class DevicePlacement:
    """Places trees of arrays on one device or on many."""

    def __init__(self, default_device: Device | None = None) -> None:
        """Use this device (JAX's first one by default) where a call names none."""
        self._default_device = jax.local_devices()[0] if default_device is None else default_device
        self._hardware_type = HardwareType.detect([self._default_device])

    @property
    def default_device(self) -> Device:
        """Where data goes when a call names no device."""
        return self._default_device

    @property
    def hardware_type(self) -> HardwareType:
        """The kind of the default device."""
        return self._hardware_type

    @property
    def num_devices(self) -> int:
        """The devices of all processes together."""
        return jax.device_count()

    def place_on_device(self, data: Any, device: Device | None = None) -> Any:
        """Put every leaf on one device."""
        return jax.device_put(data, self._default_device if device is None else device)

    def distribute_batch(self, batch: Any, sharding: Sharding) -> Any:
        """Put every leaf where the sharding says; scalars are replicated."""
        return place(batch, sharding)

    def replicate_across_devices(self, data: Any, mesh: Mesh | None = None) -> Any:
        """Put a full copy of every leaf on every device of the mesh, or on all devices."""
        everywhere = mesh or arrange_mesh({"data": self.num_devices}, jax.devices())
        return replicate(data, everywhere)

    def shard_batch_dim(
        self, data: Any, mesh: Mesh, batch_axis: int = 0, mesh_axis: str = "data"
    ) -> Any:
        """Split dim ``batch_axis`` of every leaf over ``mesh_axis``; scalars are replicated."""
        check_mesh_axis(mesh, mesh_axis)

        def choose(name: str, leaf: Any) -> NamedSharding:
            dim = _dim_of(name, np.ndim(leaf), batch_axis)
            spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, mesh_axis)
            return fit_sharding(name, leaf, NamedSharding(mesh, spec))

        return place_parts(data, choose)

    def prefetch_to_device(
        self, iterator: Iterable[Any], device: Device | Sharding | None = None, buffer_size: int = 2
    ) -> Iterator[Any]:
        """Place items on a device, or over a sharding, while earlier ones are being used.

        A thread works up to ``buffer_size`` items ahead. Errors of the source reach the consumer;
        the thread ends when the source does or when the consumer stops.
        """
        if buffer_size < 1:
            raise UserError(f"buffer_size={buffer_size}", fix="write a buffer_size of 1 or more")

        def put(item: Any) -> Any:
            if isinstance(device, Sharding):
                return self.distribute_batch(item, device)
            return self.place_on_device(item, device)

        return prefetch(iterator, put, buffer_size)

    def get_batch_size_recommendation(
        self, hardware: HardwareType | None = None
    ) -> BatchSizeRecommendation:
        """Return the batch sizes for this kind of hardware, by default the one that is here."""
        return (hardware or self._hardware_type).batch_sizes

    def validate_batch_size(
        self, batch_size: int, warn_suboptimal: bool = True
    ) -> tuple[bool, str]:
        """Say whether a batch size can be used, and everything that speaks against it.

        It cannot when it is below the minimum or does not divide over the devices. A size below
        the critical one is usable; it is mentioned when ``warn_suboptimal``.
        """
        sizes, kind = self.get_batch_size_recommendation(), self._hardware_type.value
        problems: list[str] = []
        if batch_size < sizes.min_batch_size:
            problems.append(f"below minimum {sizes.min_batch_size} for {kind}")
        if batch_size % self.num_devices:
            problems.append(f"not divisible by the {self.num_devices} devices")
        remarks = list(problems)
        if warn_suboptimal and sizes.min_batch_size <= batch_size < sizes.critical_batch_size:
            remarks.append(f"below critical size {sizes.critical_batch_size} for {kind}")
        verdict = "; ".join(remarks) or f"fine for {kind}"
        return not problems, f"batch size {batch_size} is {verdict}"

    def get_device_info(self) -> dict[str, Any]:
        """Return counts, kinds and one entry per device, ready for JSON."""
        devices = jax.devices()
        return {
            "num_devices": len(devices),
            "hardware_type": self._hardware_type.value,
            "platforms": sorted({device.platform for device in devices}),
            "device_kinds": sorted({device.device_kind for device in devices}),
            "devices": [
                {
                    "id": device.id,
                    "platform": device.platform,
                    "device_kind": device.device_kind,
                    "process_index": device.process_index,
                }
                for device in devices
            ],
        }


def _dim_of(name: str, ndim: int, batch_axis: int) -> int | None:
    """Return the leaf's batch dim; None for a scalar, which has none."""
    if ndim == 0:
        return None
    if not -ndim <= batch_axis < ndim:
        raise UserError(
            f"{name} has no dim {batch_axis}",
            why=f"it has {ndim} dim{'s' if ndim > 1 else ''}",
            fix="shard it in a call of its own, with the batch_axis it has",
        )
    return batch_axis % ndim
