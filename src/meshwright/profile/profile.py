"""A profile: the time of a step by device, activity and collective, and what to try."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from meshwright.errors import Setting, Spelling, current_spelling
from meshwright.mesh.axes import AXES, MESH_AXES

SHARES = ("compute", "communication", "input_wait", "idle")


@dataclass(frozen=True)
class DeviceTime:
    """Seconds of one device over all profiled steps.

    Compute includes what communicates at the same time, which is ``hidden``; communication is only
    that, including waiting for others.
    """

    device: int
    compute: float
    communication: float
    hidden: float
    idle: float


@dataclass(frozen=True)
class CollectiveTime:
    """Collectives of one axis, kind and module, in one step of one device.

    Axes are empty, and bytes None, if they are not known; exposed is the time without compute.
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
    """Where the time of a few steps went.

    Devices are those of all processes, collectives come longest first, and the wait for input is
    that of all steps.
    """

    steps: int
    seconds_per_step: float
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
        wall = self.steps * self.seconds_per_step
        compute = fmean([device.compute for device in self.devices]) / wall
        communication = fmean([device.communication for device in self.devices]) / wall
        free = max(0.0, 1.0 - compute - communication)
        waiting = min(free, self.input_wait_seconds / wall)
        parts = (compute, communication, waiting, free - waiting)
        return dict(zip(SHARES, parts, strict=True))

    @property
    def hidden_communication(self) -> float:
        """The share of the wall time in which communication overlapped with compute."""
        wall = self.steps * self.seconds_per_step
        return fmean([device.hidden for device in self.devices]) / wall

    @property
    def load_balance(self) -> float:
        """Compute time of the busiest device over the mean; 1 is balanced."""
        times = [device.compute for device in self.devices]
        return max(times) / fmean(times) if any(times) else 1.0

    @property
    def advice(self) -> list[str]:
        """What is slow, and what to try."""
        exposed = defaultdict[tuple[str, ...], float](float)
        for each in self.collectives:
            exposed[each.axes] += each.exposed_seconds / self.seconds_per_step
        return advise(
            self.shares, exposed, load_balance=self.load_balance, virtual=self.platform == "cpu"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of profile.json."""
        return {
            "steps": self.steps,
            "seconds_per_step": self.seconds_per_step,
            "shares": self.shares,
            "hidden_communication": self.hidden_communication,
            "load_balance": self.load_balance,
            "devices": [asdict(device) for device in self.devices],
            "collectives": [collective.to_json() for collective in self.collectives],
            "trace": self.trace,
            "advice": self.advice,
        }


ENOUGH_COMPUTE = 0.8
MOST_COMMUNICATION = 0.3
NOTICEABLE = 0.1
"""Shares of the time above this are mentioned, if anything is wrong."""
EVEN = 1.2
"""Compute time of the busiest device over the mean; more is uneven."""

_SAMPLES = Setting("training.micro_batch_size")


def axes_text(axes: Sequence[str]) -> str:
    """Return mesh axes as text, such as ``data×fsdp``; ``unknown`` without any."""
    return "×".join(axes) or "unknown"


def advise(
    shares: Mapping[str, float],
    exposed: Mapping[tuple[str, ...], float],
    *,
    load_balance: float,
    virtual: bool,
) -> list[str]:
    """Return advice; nothing if devices compute nearly all the time.

    ``exposed`` is the share of the wall time spent waiting for communication, by mesh axes; times
    of ``virtual`` devices mean little.
    """
    advice = list(_parts(shares, exposed))
    if load_balance > EVEN:
        advice.append(
            f"the busiest device computes {load_balance:.2f} times the mean; look for experts, "
            "stages or samples of uneven size, or a device that is slower than the others"
        )
    if advice and virtual:
        advice.append(
            "these are virtual devices that share one processor: waiting for a turn counts as "
            "communication, and only real devices show real shares"
        )
    return advice


def _parts(shares: Mapping[str, float], exposed: Mapping[tuple[str, ...], float]) -> Iterator[str]:
    compute, communication = shares["compute"], shares["communication"]
    if compute >= ENOUGH_COMPUTE and communication <= MOST_COMMUNICATION:
        return
    if compute < ENOUGH_COMPUTE:
        yield f"devices compute {compute:.0%} of the time, less than {ENOUGH_COMPUTE:.0%}"
    if communication > NOTICEABLE:
        yield _communication(communication, exposed)
    if shares["input_wait"] > NOTICEABLE:
        # Data from Python is read as its own code reads it.
        settings = current_spelling() is not Spelling.PYTHON
        more = "more data.workers, a larger data.prefetch, or " if settings else ""
        waiting = f"{shares['input_wait']:.0%} of the time devices wait for data"
        yield f"{waiting}; try {more}data prepared beforehand"
    if shares["idle"] > NOTICEABLE:
        yield (
            f"{shares['idle']:.0%} of the time devices are idle; try more samples per "
            f"device ({_SAMPLES}), and logging less often ({Setting('tracking.log_every')})"
        )


def _communication(share: float, exposed: Mapping[tuple[str, ...], float]) -> str:
    limit = f", more than {MOST_COMMUNICATION:.0%}" if share > MOST_COMMUNICATION else ""
    text = f"{share:.0%} of the time devices wait for communication{limit}"
    if not exposed:
        return text
    axes = max(exposed, key=lambda axes: exposed[axes])
    innermost = [MESH_AXES[axis] for axis in reversed(AXES) if axis in axes]
    remedy = next((axis.remedy() for axis in innermost if axis.remedy), "")
    if not remedy:
        return f"{text}; try more samples per device ({_SAMPLES})"
    return f"{text}, most over {axes_text(axes)} ({exposed[axes]:.0%}); try {remedy}"
