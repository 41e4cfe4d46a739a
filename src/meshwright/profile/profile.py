"""A profile: the time of an update by device, by what it was spent on, and by collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.profile.bottlenecks import advise

SHARES = ("compute", "communication", "input_wait", "idle")


@dataclass(frozen=True)
class DeviceTime:
    """Seconds of one device over all profiled updates.

    Attributes:
        device: JAX's number of the device.
        compute: time in which it computed, communicating at the same time or not.
        communication: time in which it only communicated, waiting for others included.
        hidden: time in which it communicated behind computing.
        idle: the rest.
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
        axis: the mesh axes, joined by ×; ``unknown`` if the program was not at hand.
        kind: all-gather, all-reduce, …
        module: the module they are for.
        count: how many per update.
        seconds: how long they take per update.
        exposed_seconds: how long nothing is computed meanwhile.
        bytes: what a device sends; None if not known.
    """

    axis: str
    kind: str
    module: str | None
    count: float
    seconds: float
    exposed_seconds: float
    bytes: int | None


@dataclass(frozen=True)
class Profile:
    """Where the time of some updates went.

    Attributes:
        updates: how many were profiled.
        seconds_per_update: wall time of one.
        devices: device by device; of all processes.
        collectives: what was communicated, the longest first.
        input_wait_seconds: how long the loop waited for data, all updates together.
        platform: of the devices: cpu, gpu or tpu.
        trace: where the trace is.
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
        """Parts of the wall time, mean over devices; together 1.

        Waiting for data is at most what devices are idle: a wait behind computing costs nothing.
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
        """The part of the wall time in which communication ran behind computing."""
        wall = self.updates * self.seconds_per_update
        return _mean([device.hidden for device in self.devices]) / wall

    @property
    def load_balance(self) -> float:
        """Computing time of the busiest device over the mean; 1 is even."""
        times = [device.compute for device in self.devices]
        return max(times) / _mean(times) if any(times) else 1.0

    @property
    def advice(self) -> list[str]:
        """What stands out, and what to try."""
        exposed: dict[str, float] = {}
        for collective in self.collectives:
            exposed[collective.axis] = exposed.get(collective.axis, 0.0) + (
                collective.exposed_seconds / self.seconds_per_update
            )
        return advise(
            self.shares, exposed, load_balance=self.load_balance, virtual=self.platform == "cpu"
        )

    def to_json(self) -> dict[str, Any]:
        """Return what profile.json holds."""
        return {
            "updates": self.updates,
            "seconds_per_update": self.seconds_per_update,
            "shares": self.shares,
            "hidden_communication": self.hidden_communication,
            "load_balance": self.load_balance,
            "devices": [asdict(device) for device in self.devices],
            "collectives": [asdict(collective) for collective in self.collectives],
            "trace": self.trace,
            "advice": self.advice,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
