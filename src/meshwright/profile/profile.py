"""A profile: the time of an update by device, by activity, and by collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.profile.bottlenecks import advise, axes_text

SHARES = ("compute", "communication", "input_wait", "idle")


@dataclass(frozen=True)
class DeviceTime:
    """Seconds of one device over all profiled updates.

    Attributes:
        device: JAX's number of the device.
        compute: time spent computing, with or without communication at the same time.
        communication: time spent only communicating, including waiting for others.
        hidden: communication time that overlaps with compute.
        idle: the remaining time.
    """

    device: int
    compute: float
    communication: float
    hidden: float
    idle: float


@dataclass(frozen=True)
class CollectiveTime:
    """Collectives of one axis, kind and module, in one update of one device.

    Attributes:
        axes: the mesh axes; empty if they are not known.
        kind: all-gather, all-reduce, …
        module: the module they belong to.
        count: collectives per update.
        seconds: time per update.
        exposed_seconds: the part of that time without compute.
        bytes: bytes a device sends per update; None if not known.
    """

    axes: tuple[str, ...]
    kind: str
    module: str | None
    count: float
    seconds: float
    exposed_seconds: float
    bytes: int | None

    @property
    def axis(self) -> str:
        """The mesh axes as text, joined by ×."""
        return axes_text(self.axes)

    def to_json(self) -> dict[str, Any]:
        """Return the entry in profile.json."""
        values = asdict(self)
        del values["axes"]
        return {"axis": self.axis, **values}


@dataclass(frozen=True)
class Profile:
    """Where the time of a few updates went.

    Attributes:
        updates: number of profiled updates.
        seconds_per_update: wall time of one update.
        devices: times of each device, in all processes.
        collectives: times of collectives, longest first.
        input_wait_seconds: time the loop waited for data, over all updates.
        platform: cpu, gpu or tpu.
        trace: the folder of the trace.
    """

    updates: int
    seconds_per_update: float
    devices: tuple[DeviceTime, ...]
    collectives: tuple[CollectiveTime, ...]
    input_wait_seconds: float = 0.0
    platform: str = "cpu"
    trace: str = ""

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the wall time, averaged over devices; they add up to 1.

        Waiting for data counts only while devices are idle: otherwise it costs nothing.
        """
        wall = self.updates * self.seconds_per_update
        compute = _mean([device.compute for device in self.devices]) / wall
        communication = _mean([device.communication for device in self.devices]) / wall
        free = max(0.0, 1.0 - compute - communication)
        waiting = min(free, self.input_wait_seconds / wall)
        parts = (compute, communication, waiting, free - waiting)
        return dict(zip(SHARES, parts, strict=True))

    @property
    def hidden_communication(self) -> float:
        """The share of the wall time in which communication overlapped with compute."""
        wall = self.updates * self.seconds_per_update
        return _mean([device.hidden for device in self.devices]) / wall

    @property
    def load_balance(self) -> float:
        """Compute time of the busiest device over the mean; 1 is balanced."""
        times = [device.compute for device in self.devices]
        return max(times) / _mean(times) if any(times) else 1.0

    @property
    def advice(self) -> list[str]:
        """What is slow, and what to try."""
        exposed: dict[tuple[str, ...], float] = {}
        for collective in self.collectives:
            exposed[collective.axes] = exposed.get(collective.axes, 0.0) + (
                collective.exposed_seconds / self.seconds_per_update
            )
        return advise(
            self.shares, exposed, load_balance=self.load_balance, virtual=self.platform == "cpu"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of profile.json."""
        return {
            "updates": self.updates,
            "seconds_per_update": self.seconds_per_update,
            "shares": self.shares,
            "hidden_communication": self.hidden_communication,
            "load_balance": self.load_balance,
            "devices": [asdict(device) for device in self.devices],
            "collectives": [collective.to_json() for collective in self.collectives],
            "trace": self.trace,
            "advice": self.advice,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
