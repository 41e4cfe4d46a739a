"""How much memory a device of this process has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from meshwright.hardware import Hardware, detect, find_chip
from meshwright.runtime.host_machine import host_memory
from meshwright.text.units import counted, human_bytes

SHARED = "devices of one host share its memory, so that more of them hold no more"
"""Why more virtual devices are no remedy."""


@dataclass(frozen=True)
class Capacity:
    """The memory of one device, where the figure comes from, and if more devices only divide it."""

    bytes: int
    source: str
    shared: bool = False

    def __str__(self) -> str:
        return f"{human_bytes(self.bytes)} ({self.source})"


def device_capacity(
    devices: Sequence[Any], host: Callable[[], Mapping[str, int | None]] = host_memory
) -> Capacity | None:
    """Return the memory of the smallest device, if known; virtual ones share the host's."""
    if not devices:
        return None
    if all(device.platform == "cpu" for device in devices):
        return _shared(len(devices), host())
    limits = [_limit(device) for device in devices]
    known = [limit for limit in limits if limit is not None]
    return min(known, key=lambda capacity: capacity.bytes) if len(known) == len(limits) else None


def known_hardware(devices: Sequence[Any]) -> Hardware | None:
    """Return the hardware of these devices from the table; None if it is not known.

    Virtual devices have a part of the memory of the host.
    """
    hardware = detect(devices)
    if hardware is None or hardware.chip.platform != "cpu":
        return hardware
    here = [device for device in devices if device.process_index == jax.process_index()]
    capacity = device_capacity(here)
    if capacity is None:
        return hardware
    return replace(hardware, chip=replace(hardware.chip, hbm_gb=capacity.bytes / 1e9))


def _limit(device: Any) -> Capacity | None:
    try:
        stats = device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError, AttributeError):
        stats = {}
    if limit := stats.get("bytes_limit"):
        return Capacity(int(limit), f"what JAX may use of a {device.device_kind}")
    chip = find_chip(device.device_kind)
    if chip is None:
        return None
    return Capacity(int(chip.hbm_gb_per_device * 1e9), f"the memory of a {chip.name}")


def _shared(count: int, memory: Mapping[str, int | None]) -> Capacity | None:
    known = (memory.get("host_total_bytes"), memory.get("container_limit_bytes"))
    totals = [total for total in known if total]
    if not totals:
        return None
    whole = min(totals)
    text = f"the {human_bytes(whole)} of this host, shared by {counted(count, 'device')}"
    return Capacity(whole // count, text, shared=True)
