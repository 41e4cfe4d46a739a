"""From a trace to a profile: which operations are collectives, and times by device."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from meshwright import processes
from meshwright.compiled.collectives import Collective, read_collectives
from meshwright.compiled.hlo import parse_hlo
from meshwright.profile.events import Trace, TracedEvent, clip, length, merge, read_trace, subtract
from meshwright.profile.profile import CollectiveTime, DeviceTime, Profile
from meshwright.program.jaxpr.names import common_module

_SECONDS = 1e-9
"""Times in a trace are in nanoseconds."""


def read_profile(
    trace: Path, mesh: Mesh, program: str | None, *, steps: int, input_wait_seconds: float = 0.0
) -> Profile:
    """Read what `Profiler` recorded; with several processes, each must call this.

    Without the text of the ``program``, ``compiled.as_text()``, axes and modules are not known.
    """
    recorded = read_trace(trace)
    numbers = device_numbers(mesh.local_devices, {event.device for event in recorded.events})
    times, found = split_times(recorded, CollectiveNames(program, dict(mesh.shape)), numbers)
    local = {
        "devices": [asdict(time) for time in times],
        "wall": length([recorded.window]),
        "waited": input_wait_seconds,
    }
    gathered = processes.gather(local)
    devices = [DeviceTime(**time) for process in gathered for time in process["devices"]]
    return Profile(
        steps=steps,
        seconds_per_step=max(process["wall"] for process in gathered) * _SECONDS / steps,
        devices=tuple(sorted(devices, key=lambda time: time.device)),
        collectives=tuple(collective_times(found, steps * max(len(times), 1))),
        input_wait_seconds=max(process["waited"] for process in gathered),
        platform=mesh.devices.flat[0].platform,
        trace=str(trace),
    )


class CollectiveRun(NamedTuple):
    """One run of a collective on one device; exposed is the time without compute."""

    collective: TracedCollective
    seconds: float
    exposed_seconds: float


def collective_times(found: Sequence[CollectiveRun], runs: int) -> list[CollectiveTime]:
    """Return times by axis, kind and module, the longest first; runs are steps × devices."""
    groups: dict[tuple[tuple[str, ...], str, str | None], list[CollectiveRun]] = defaultdict(list)
    for run in found:
        what = run.collective
        groups[what.axes, what.kind, what.module].append(run)
    times = [
        CollectiveTime(
            axes=axes,
            kind=kind,
            module=module,
            count=len(group) / runs,
            seconds=sum(run.seconds for run in group) / runs,
            exposed_seconds=sum(run.exposed_seconds for run in group) / runs,
            bytes=_mean_bytes([run.collective.sent_bytes for run in group], runs),
        )
        for (axes, kind, module), group in groups.items()
    ]
    return sorted(times, key=lambda time: -time.seconds)


def _mean_bytes(sizes: Sequence[float | None], runs: int) -> int | None:
    known = [size for size in sizes if size is not None]
    return round(sum(known) / runs) if known else None


def split_times(
    trace: Trace, collectives: CollectiveNames, numbers: dict[int, int]
) -> tuple[list[DeviceTime], list[CollectiveRun]]:
    """Divide the time of the numbered devices into compute, communication and idle time."""
    found: list[CollectiveRun] = []
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
                exposed = length(subtract([inside], computing)) * _SECONDS
                found.append(CollectiveRun(collective, length([inside]) * _SECONDS, exposed))
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
    return times, found


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


_KINDS = {
    "all-reduce": "all.?reduce|psum(?!_scatter)",
    "all-gather": "all.?gather",
    "reduce-scatter": "reduce.?scatter|psum_scatter",
    "all-to-all": "all.?to.?all",
    "collective-permute": "collective.?permute|ppermute|send.?recv",
    "collective-broadcast": "collective.?broadcast|pbroadcast|Kernel_Broadcast",
}
_KERNEL = re.compile(r"nccl|rccl", re.IGNORECASE)


@dataclass(frozen=True)
class TracedCollective:
    """A collective instruction of the compiled program.

    Its module is None outside modules, or if it combines several; bytes are sent per execution.
    """

    kind: str
    axes: tuple[str, ...] = ()
    module: str | None = None
    sent_bytes: float | None = None


class CollectiveNames:
    """Finds the collectives of a trace by the names of operations."""

    def __init__(self, program: str | None, mesh: Mapping[str, int]) -> None:
        self._by_instruction = _instructions(program, mesh) if program else None

    def find(self, name: str, kernel: str) -> TracedCollective | None:
        """Return the collective an operation belongs to; None if it computes."""
        if self._by_instruction is not None and name in self._by_instruction:
            return self._by_instruction[name]
        if _KERNEL.search(kernel):
            return TracedCollective(_kind(kernel, "") or "collective")
        # Without the program only names are left; a fusion may be named after its consumer.
        known = self._by_instruction is not None or "fusion" in name
        kind = "" if known else _kind(name, r"(\w+\.)?")
        return TracedCollective(kind) if kind else None


def _kind(text: str, before: str) -> str:
    look = re.match if before else re.search
    patterns = {kind: f"{before}({pattern})" for kind, pattern in _KINDS.items()}
    return next((k for k, pattern in patterns.items() if look(pattern, text, re.IGNORECASE)), "")


def _instructions(program: str, mesh: Mapping[str, int]) -> dict[str, TracedCollective]:
    """Return the collectives of a program by the names of their instructions."""
    parts: dict[str, list[Collective]] = {}
    for collective in read_collectives(program, mesh):
        parts.setdefault(collective.name, []).append(collective)
    by_name = {name: _combine(combined) for name, combined in parts.items()}
    for computation in parse_hlo(program).computations.values():
        for instruction in computation.instructions:
            # Waiting for a collective counts as part of it.
            if instruction.opcode.endswith("-done") and instruction.operands[0] in by_name:
                by_name[instruction.name] = by_name[instruction.operands[0]]
    return by_name


def _combine(parts: list[Collective]) -> TracedCollective:
    axes = list(dict.fromkeys(axis for part in parts for axis in part.axes))
    return TracedCollective(
        kind=parts[0].kind,
        axes=tuple(axes),
        module=common_module(part.module for part in parts) or None,
        sent_bytes=sum(part.sent_bytes / max(part.count, 1) for part in parts),
    )
