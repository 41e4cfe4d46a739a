"""Reading a trace: which device ran which operation when, on CPUs, GPUs and TPUs."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshwright.errors import EnvironmentProblem

Interval = tuple[float, float]
"""Start and end, in nanoseconds."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, sorted and without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return ``whole`` without ``taken``; both must be merged."""
    left: list[Interval] = []
    position = 0
    for start, end in whole:
        while position < len(taken) and taken[position][1] <= start:
            position += 1
        at = position
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals inside a window, merged."""
    first, last = window
    return merge((max(start, first), min(end, last)) for start, end in intervals)


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of merged intervals, in nanoseconds."""
    return sum(end - start for start, end in intervals)


MARK = "meshwright profile"
"""The name in the trace of the time between start and stop."""
_DEVICE_PLANE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
_TPU_LINES = ("XLA Ops", "Async XLA Ops")
_STREAM = re.compile(r"Stream\b")
_CONTAINER = re.compile(r"(\w+\.)*(while|call|conditional)(\.|$)|parallel_call")
_TRANSFER = re.compile(r"Memcpy(H2D|D2H|HtoD|DtoH)|MemcpyAsync", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """An operation on a device.

    ``name`` is the HLO instruction, or the kernel's own name where the trace names none; times are
    in nanoseconds since the trace began.
    """

    device: int
    name: str
    kernel: str
    start: float
    end: float

    @property
    def interval(self) -> Interval:
        """Start and end time."""
        return self.start, self.end


@dataclass(frozen=True)
class Trace:
    """The operations of a trace, and the time window that was profiled."""

    events: list[TracedEvent]
    window: Interval


def read_trace(folder: Path) -> Trace:
    """Read the newest trace in a folder."""
    from jax.profiler import ProfileData

    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise EnvironmentProblem(
            f"there is no trace in {folder}", why="no file plugins/profile/*/*.xplane.pb"
        )
    return read_planes(ProfileData.from_file(str(files[-1])).planes)


def read_planes(planes: Iterable[Any]) -> Trace:
    """Read the planes of a trace: one for the host and, except on CPUs, one per device."""
    events: list[TracedEvent] = []
    marks: list[Interval] = []
    for plane in planes:
        if device := _DEVICE_PLANE.fullmatch(plane.name):
            events += _device_events(plane, int(device[1]))
        elif plane.name == "/host:CPU":
            for line in plane.lines:
                on_cpu, marked = _host_line(line)
                events += on_cpu
                marks += marked
    if not events:
        raise EnvironmentProblem(
            "the trace contains no operation of a device",
            fix="profile at least one step, with devices JAX can trace",
        )
    whole = min(event.start for event in events), max(event.end for event in events)
    window = marks[-1] if marks else whole
    return Trace([e for e in events if e.end > window[0] and e.start < window[1]], window)


def _device_events(plane: Any, device: int) -> Iterator[TracedEvent]:
    """Yield what an accelerator ran: a TPU's line of operations, or a GPU's streams."""
    lines = list(plane.lines)
    chosen = [line for line in lines if line.name in _TPU_LINES]
    for line in chosen or [line for line in lines if _STREAM.match(line.name)]:
        events = [
            TracedEvent(device, _instruction(event), event.name, *_times(event))
            for event in line.events
            # A copy from or to the host is neither compute nor communication between devices.
            if not _TRANSFER.match(event.name)
        ]
        yield from _leaves(events)


def _host_line(line: Any) -> tuple[list[TracedEvent], list[Interval]]:
    """Return what a thread ran for a CPU device, and the marks around profiles."""
    events: list[TracedEvent] = []
    marks: list[Interval] = []
    for event in line.events:
        if event.name == MARK:
            marks.append(_times(event))
            continue
        if event.name.startswith("end: ") or event.duration_ns <= 0:
            continue
        stats = _stats(event, "hlo_op", "device_ordinal")
        if "hlo_op" in stats:
            device = int(stats.get("device_ordinal", 0))
            events.append(TracedEvent(device, str(stats["hlo_op"]), event.name, *_times(event)))
    return list(_leaves(events)), marks


def _leaves(events: list[TracedEvent]) -> Iterator[TracedEvent]:
    """Leave out loops and calls, whose time is that of the operations inside them."""
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    for event, following in zip_longest(ordered, ordered[1:]):
        inside = following is not None and following.end <= event.end
        same = following is not None and following.device == event.device
        if not (inside and same) and not _CONTAINER.match(event.name):
            yield event


def _stats(event: Any, *wanted: str) -> dict[str, Any]:
    """Return some of an event's statistics; reading all of them takes seconds per trace."""
    stats: dict[str, Any] = {}
    for key, value in event.stats:
        if key in wanted:
            stats[key] = value
            if len(stats) == len(wanted):
                break
    return stats


def _instruction(event: Any) -> str:
    stats = _stats(event, "hlo_op")
    # TPUs write the whole instruction: `%fusion.3 = f32[8]{0} fusion(…)`.
    return str(stats.get("hlo_op") or event.name).split(" ")[0].removeprefix("%")


def _times(event: Any) -> Interval:
    return event.start_ns, event.start_ns + event.duration_ns
