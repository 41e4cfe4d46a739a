"""DevicePlacement: putting data on devices. HardwareType: kinds of devices and batch sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from queue import Empty, Queue
from typing import Self, TypedDict

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright.distributed.argument_forms import also_called
from meshwright.distributed.leaves import Leaf, fit_sharding, place, place_parts, replicate
from meshwright.errors import UserError
from meshwright.hardware import BatchSizeRecommendation, detect, load_chips, unknown_batch_sizes
from meshwright.mesh.build import Device, arrange_mesh, check_mesh_axis
from meshwright.trees import Batch, PyTree


class DeviceDescription(TypedDict):
    """One device, ready for JSON."""

    id: int
    platform: str
    device_kind: str
    process_index: int


class DeviceInfo(TypedDict):
    """The devices of all processes, ready for JSON."""

    num_devices: int
    hardware_type: str
    platforms: list[str]
    device_kinds: list[str]
    devices: list[DeviceDescription]


class DevicePlacement:
    """Places pytrees of arrays on one device or on many."""

    def __init__(self, default_device: Device | None = None) -> None:
        """Use this device (JAX's first one by default) when a call names no device."""
        self._default_device = jax.local_devices()[0] if default_device is None else default_device
        self._hardware_type = HardwareType.detect([self._default_device])

    @property
    def default_device(self) -> Device:
        """The device used when a call names none."""
        return self._default_device

    @property
    def hardware_type(self) -> HardwareType:
        """The kind of the default device."""
        return self._hardware_type

    @property
    def num_devices(self) -> int:
        """The number of devices of all processes."""
        return jax.device_count()

    def place_on_device(self, data: PyTree, device: Device | None = None) -> PyTree:
        """Put every leaf on one device."""
        return jax.device_put(data, self._default_device if device is None else device)

    @also_called(batch="data")
    def distribute_batch(self, data: Batch, sharding: Sharding) -> Batch:
        """Put every leaf on devices with this sharding; scalars are replicated."""
        return place(data, sharding)

    @also_called(mesh="devices")
    def replicate_across_devices(
        self, data: PyTree, devices: Sequence[Device] | Mesh | None = None
    ) -> PyTree:
        """Put a full copy of every leaf on each of these devices or of a mesh; by default on all.

        ``mesh=`` is another name for ``devices=``.
        """
        if isinstance(devices, Mesh):
            return replicate(data, devices)
        chosen = list(jax.devices() if devices is None else devices)
        if not chosen:
            raise UserError(
                "the list of devices is empty", fix="leave devices= out for all of them"
            )
        return replicate(data, arrange_mesh({"data": len(chosen)}, chosen))

    def shard_batch_dim(
        self, data: PyTree, mesh: Mesh, batch_axis: int = 0, mesh_axis: str = "data"
    ) -> PyTree:
        """Split dim ``batch_axis`` of every leaf over ``mesh_axis``; scalars are replicated."""
        check_mesh_axis(mesh, mesh_axis)

        def choose(name: str, leaf: Leaf) -> NamedSharding:
            dim = _dim_of(name, np.ndim(leaf), batch_axis)
            spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, mesh_axis)
            return fit_sharding(name, leaf, NamedSharding(mesh, spec))

        return place_parts(data, choose)

    @also_called(iterator="data_iterator")
    def prefetch_to_device(
        self,
        data_iterator: Iterable[PyTree],
        device: Device | Sharding | None = None,
        buffer_size: int = 2,
    ) -> Iterator[PyTree]:
        """Place items on a device, or with a sharding, while earlier ones are in use.

        A thread works up to ``buffer_size`` items ahead. Errors of the iterator reach the consumer.
        The thread ends with the iterator, or when the consumer stops.
        """
        if buffer_size < 1:
            raise UserError(
                f"buffer_size={buffer_size} is not valid", fix="write a buffer_size of 1 or more"
            )

        def put(item: PyTree) -> PyTree:
            if isinstance(device, Sharding):
                return self.distribute_batch(item, device)
            return self.place_on_device(item, device)

        return prefetch(data_iterator, put, buffer_size)

    @also_called(hardware="hardware_type")
    def get_batch_size_recommendation(
        self, hardware_type: HardwareType | None = None
    ) -> BatchSizeRecommendation:
        """Return batch sizes for this kind of hardware, by default that of the default device."""
        return (hardware_type or self._hardware_type).batch_sizes

    def validate_batch_size(
        self, batch_size: int, warn_suboptimal: bool = True
    ) -> tuple[bool, str]:
        """Return whether a batch size is valid, and a message with every problem.

        A batch size is invalid if it is below the minimum or not divisible by the number of
        devices. One below the critical size is valid; ``warn_suboptimal`` mentions it.
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

    def get_device_info(self) -> DeviceInfo:
        """Return the number, kinds and properties of all devices."""
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


def place_on_device(data: PyTree, device: Device | None = None) -> PyTree:
    """`DevicePlacement.place_on_device` as a function."""
    return DevicePlacement().place_on_device(data, device)


def distribute_batch(data: Batch, sharding: Sharding) -> Batch:
    """`DevicePlacement.distribute_batch` as a function."""
    return DevicePlacement().distribute_batch(data, sharding)


def get_batch_size_recommendation(
    hardware_type: HardwareType | None = None,
) -> BatchSizeRecommendation:
    """`DevicePlacement.get_batch_size_recommendation` as a function."""
    return DevicePlacement().get_batch_size_recommendation(hardware_type)


def _dim_of(name: str, ndim: int, batch_axis: int) -> int | None:
    """Return the leaf's batch dim; None for a scalar, which has none."""
    if ndim == 0:
        return None
    if not -ndim <= batch_axis < ndim:
        raise UserError(
            f"{name} has no dim {batch_axis}",
            why=f"it has {ndim} dim{'s' if ndim > 1 else ''}",
            fix="shard it in a separate call with its own batch_axis",
        )
    return batch_axis % ndim


class HardwareType(Enum):
    """Kinds of devices; variants of a chip with different memory share a member."""

    V100 = "v100"
    A100 = "a100"
    H100 = "h100"
    H200 = "h200"
    B200 = "b200"
    GB200 = "gb200"
    H20 = "h20"
    RTX_PRO_6000 = "rtx_pro_6000"
    RTX_5090 = "rtx_5090"
    RTX_4090 = "rtx_4090"
    L40S = "l40s"
    L4 = "l4"
    A10G = "a10g"
    T4 = "t4"
    MI300X = "mi300x"
    TPU_V4 = "tpu_v4"
    TPU_V5E = "tpu_v5e"
    TPU_V5P = "tpu_v5p"
    TPU_V6E = "tpu_v6e"
    TPU_7X = "tpu_7x"
    CPU = "cpu"
    UNKNOWN = "unknown"

    @classmethod
    def detect(cls, devices: Sequence[Device] | None = None) -> Self:
        """Return the kind of these devices (all of JAX's by default); UNKNOWN if in doubt."""
        hardware = detect(devices)
        family = "unknown" if hardware is None else hardware.chip.family
        # Users may add chips of their own.
        return cls(family if family in {kind.value for kind in cls} else "unknown")

    @property
    def batch_sizes(self) -> BatchSizeRecommendation:
        """Recommended batch sizes for this kind of device."""
        for chip in load_chips().values():
            if chip.family == self.value:
                return chip.batch_sizes
        return unknown_batch_sizes()


def prefetch(
    source: Iterable[PyTree], prepare: Callable[[PyTree], PyTree], buffer_size: int
) -> Iterator[PyTree]:
    """Yield ``prepare(item)`` for each item, up to ``buffer_size`` items ahead of the consumer.

    The thread starts with the first request. An exception in the source or in ``prepare`` reaches
    the consumer after the items before it. If the consumer stops early (``break``, an exception,
    or a deleted iterator), the thread ends after its current item.
    """
    assert buffer_size >= 1
    queue: Queue[tuple[PyTree, BaseException | None] | None] = Queue(maxsize=buffer_size)
    stop = threading.Event()

    def produce() -> None:
        try:
            for item in source:
                if not stop.is_set():
                    queue.put((prepare(item), None))
                if stop.is_set():
                    return
        except BaseException as error:
            queue.put((None, error))
        else:
            queue.put(None)

    # A daemon thread: a source that blocks forever must not keep the program alive.
    threading.Thread(target=produce, name="prefetch", daemon=True).start()
    try:
        while (item := queue.get()) is not None:
            value, error = item
            if error is not None:
                raise error
            yield value
    finally:
        stop.set()
        # Emptied, the queue takes what the thread is blocked with, which then sees the event.
        with suppress(Empty):
            while True:
                queue.get_nowait()
