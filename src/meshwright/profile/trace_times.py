"""From a trace to a profile: times by device, and by collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from meshwright import processes
from meshwright.profile.events import (
    Interval,
    Trace,
    TracedEvent,
    clip,
    length,
    merge,
    read_trace,
    subtract,
)
from meshwright.profile.profile import CollectiveTime, DeviceTime, Profile
from meshwright.profile.traced_collectives import CollectiveNames, TracedCollective

_SECONDS = 1e-9
"""Times in a trace are in nanoseconds."""


def read_profile(
    trace: Path,
    mesh: Mesh,
    program: str | None,
    *,
    updates: int,
    input_wait_seconds: float = 0.0,
) -> Profile:
    """Read what `Profiler` recorded; with several processes, each must call this.

    Args:
        trace: the folder of this process's trace.
        mesh: the mesh of the updates.
        program: the optimized HLO text of the step, ``compiled.as_text()``; without it, axes and
            modules are not known.
        updates: number of updates between start and stop.
        input_wait_seconds: how long the loop waited for data in that time.
    """
    recorded = read_trace(trace)
    numbers = device_numbers(mesh.local_devices, {event.device for event in recorded.events})
    times, totals = split_times(recorded, CollectiveNames(program, dict(mesh.shape)), numbers)
    local = {
        "devices": [asdict(time) for time in times],
        "wall": length([recorded.window]),
        "waited": input_wait_seconds,
    }
    gathered = processes.gather(local)
    devices = [DeviceTime(**time) for process in gathered for time in process["devices"]]
    return Profile(
        updates=updates,
        seconds_per_update=max(process["wall"] for process in gathered) * _SECONDS / updates,
        devices=tuple(sorted(devices, key=lambda time: time.device)),
        collectives=tuple(totals.times(updates, max(len(times), 1))),
        input_wait_seconds=max(process["waited"] for process in gathered),
        platform=mesh.devices.flat[0].platform,
        trace=str(trace),
    )


@dataclass
class CollectiveTotals:
    """Times of collectives, summed over updates and local devices."""

    count: dict[TracedCollective, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[TracedCollective, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[TracedCollective, float] = field(default_factory=lambda: defaultdict(float))

    def add(
        self, collective: TracedCollective, interval: Interval, computing: Sequence[Interval]
    ) -> None:
        """Count one collective of one device."""
        self.count[collective] += 1
        self.seconds[collective] += (interval[1] - interval[0]) * _SECONDS
        self.exposed[collective] += length(subtract([interval], computing)) * _SECONDS

    def times(self, updates: int, devices: int) -> list[CollectiveTime]:
        """Return the times per update and device by axis, kind and module, the longest first."""
        runs = updates * devices
        groups: dict[tuple[tuple[str, ...], str, str | None], list[TracedCollective]] = defaultdict(
            list
        )
        for collective in self.count:
            groups[collective.axes, collective.kind, collective.module].append(collective)
        times = [
            CollectiveTime(
                axes=axes,
                kind=kind,
                module=module,
                count=sum(self.count[e] for e in group) / runs,
                seconds=sum(self.seconds[e] for e in group) / runs,
                exposed_seconds=sum(self.exposed[e] for e in group) / runs,
                bytes=self._bytes(group, runs),
            )
            for (axes, kind, module), group in groups.items()
        ]
        return sorted(times, key=lambda time: -time.seconds)

    def _bytes(self, group: Sequence[TracedCollective], runs: int) -> int | None:
        sizes = [(e.sent_bytes, self.count[e]) for e in group if e.sent_bytes is not None]
        return round(sum(size * count for size, count in sizes) / runs) if sizes else None


def split_times(
    trace: Trace, collectives: CollectiveNames, numbers: dict[int, int]
) -> tuple[list[DeviceTime], CollectiveTotals]:
    """Divide the time of every device into compute, communication and idle time.

    Args:
        trace: what was recorded.
        collectives: finds collectives by name.
        numbers: JAX's device id by the number in the trace; other devices are ignored.
    """
    totals = CollectiveTotals()
    times: list[DeviceTime] = []
    by_device: dict[int, list[TracedEvent]] = {number: [] for number in numbers}
    for event in trace.events:
        if event.device in by_device:
            by_device[event.device].append(event)
    for local, events in by_device.items():
        labelled = [(event, collectives.find(event.name, event.kernel)) for event in events]
        computing = clip((event.interval for event, e in labelled if e is None), trace.window)
        communicating = clip(
            (event.interval for event, e in labelled if e is not None), trace.window
        )
        for event, collective in labelled:
            if collective is not None:
                (inside,) = clip([event.interval], trace.window) or [(0.0, 0.0)]
                totals.add(collective, inside, computing)
        exposed = length(subtract(communicating, computing))
        busy = length(merge([*computing, *communicating]))
        times.append(
            DeviceTime(
                device=numbers[local],
                compute=length(computing) * _SECONDS,
                communication=exposed * _SECONDS,
                hidden=(length(communicating) - exposed) * _SECONDS,
                idle=(length([trace.window]) - busy) * _SECONDS,
            )
        )
    return times, totals


def device_numbers(devices: Sequence[Any], traced: set[int]) -> dict[int, int]:
    """Return the JAX device id of each of this process's devices by its number in a trace.

    CPUs are traced under JAX's id, accelerators under their hardware id. If neither matches, both
    are paired in order.
    """
    ids = sorted(device.id for device in devices)
    hardware = {getattr(device, "local_hardware_id", None): device.id for device in devices}
    for numbers in ({number: number for number in ids}, hardware):
        if traced <= set(numbers):
            return {int(number): device for number, device in numbers.items() if number is not None}
    return dict(zip(sorted(traced), ids, strict=False))
