"""Checking that devices communicate: an all-reduce with a known result."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.errors import typed_line

TIMEOUT_SECONDS = 120.0
"""Including compilation; a collective that takes longer is considered stuck."""

Vector = np.ndarray[Any, np.dtype[Any]]


def check_all_reduce(
    devices: Sequence[Any], timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Sum over all devices and compare with the closed form n(n+1)/2, device by device."""
    outcome: dict[str, Any] = {"error": f"no result within {timeout_seconds:g} s"}

    def work() -> None:
        try:
            outcome.update(received=all_reduce(devices), error=None)
        except Exception as error:
            # Any error of the backend is part of the report.
            outcome["error"] = typed_line(error)

    # A stuck collective cannot be cancelled, so it stays in a daemon thread.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    wrong = find_wrong([device.id for device in devices], outcome.get("received", {}))
    error = outcome["error"]
    return {
        "ok": error is None and not wrong,
        "expected": len(devices) * (len(devices) + 1) // 2,
        "wrong_devices": wrong,
        "error": error,
    }


def all_reduce(devices: Sequence[Any]) -> dict[int, Vector]:
    """Return the result on each device of this process.

    The device at position i contributes i + 1 in slot i, so every device must receive 1, 2, … n.
    """
    import jax
    from jax.sharding import Mesh, PartitionSpec

    count = len(devices)
    mesh = Mesh(np.array(devices, dtype=object), ("all",))

    def contribute() -> jax.Array:
        position = jax.lax.axis_index("all")
        slots = jax.numpy.arange(count, dtype=jax.numpy.float32)
        return jax.lax.psum(jax.numpy.where(slots == position, slots + 1, 0), "all")

    summed = jax.jit(jax.shard_map(contribute, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))()
    return {shard.device.id: np.asarray(shard.data) for shard in summed.addressable_shards}


def find_wrong(ids: Sequence[int], received: Mapping[int, Vector]) -> list[dict[str, Any]]:
    """Name the devices at fault, given what each device received.

    A slot that is wrong everywhere is the fault of its sender; others are of their receiver.
    """
    expected = np.arange(1, len(ids) + 1)
    wrong = {device: vector != expected for device, vector in received.items()}
    everywhere = np.logical_and.reduce(list(wrong.values())) if wrong else expected < 0
    faults = {ids[slot]: "sends a wrong value" for slot in np.flatnonzero(everywhere).tolist()}
    for device, slots in wrong.items():
        if (slots & ~everywhere).any():
            faults[device] = "receives a wrong sum"
    return [{"id": device, "fault": fault} for device, fault in sorted(faults.items())]
