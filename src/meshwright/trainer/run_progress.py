"""The progress of a run: how far it is, how fast it is, and why it stops."""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jax

from meshwright.compiled.memory import memory_stats

Metrics = dict[str, float]


class StopReason(Enum):
    """Why a run stopped."""

    ALL_STEPS = "all steps"
    OUT_OF_BATCHES = "out of batches"
    OUT_OF_TIME = "out of time"
    CALLBACK = "callback"
    SIGNAL = "signal"
    RESTORED = "restored"


@dataclass(frozen=True)
class Stop:
    """Why a run stops: the kind of reason, and the reason for people."""

    reason: StopReason
    text: str

    @property
    def interrupted(self) -> bool:
        """Whether a signal stops it; then only the state is saved."""
        return self.reason is StopReason.SIGNAL


ALL_DONE = Stop(StopReason.ALL_STEPS, "all steps are done")
NONE_ASKED = Stop(StopReason.ALL_STEPS, "no steps were asked for")


def out_of_batches(done: int, steps: int | None, seconds: float | None) -> Stop:
    """Return the stop of a run whose data ended before its last step or its time limit."""
    if steps is not None:
        when = f"{done} of {steps} steps"
    else:
        when = f"{done} steps" + ("" if seconds is None else f", before {seconds:g} s had passed")
    return Stop(StopReason.OUT_OF_BATCHES, f"the batches ran out after {when}")


@dataclass
class Progress:
    """The progress of a run: losses and rewards by step from 1, and evaluations by steps done.

    Of the steps done, some were skipped, because they were not finite. ``left_out`` are batches
    left out when the run went back, as the first and the last of each.
    """

    step: int = 0
    losses: dict[int, float] = field(default_factory=dict[int, float])
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    eval: dict[int, Metrics] = field(default_factory=dict[int, Metrics])
    stop: Stop = ALL_DONE
    skipped: int = 0
    left_out: list[list[int]] = field(default_factory=list[list[int]])

    def near(self) -> str:
        """Say what the run is doing; devices may be a step or two behind."""
        return f"training, near step {max(self.step, 1)}"

    def go_back(self, step: int, skipped: int) -> None:
        """Forget what came after a step."""
        self.step, self.skipped = step, skipped
        for values in (self.losses, self.rewards, self.eval):
            for later in [each for each in values if each > step]:
                del values[later]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one step, and the peak of all devices together; None for what is not known."""

    samples: int
    tokens: int | None = None
    flops: int | None = None
    peak_flops: float | None = None


class Meter:
    """Measures speed between two readings; time spent on other things can be excluded."""

    def __init__(self, work: Work, devices: list[Any]) -> None:
        self._work = work
        self._devices = devices
        self._started = time.perf_counter()
        self._excluded = self._waited = 0.0
        self._steps = 0

    def restart(self, steps: int, waited: float) -> None:
        """Begin an interval, given the steps done and the seconds spent waiting for data."""
        self._started = time.perf_counter()
        self._excluded = 0.0
        self._steps, self._waited = steps, waited

    def exclude(self, seconds: float) -> None:
        """Exclude time spent on something other than training."""
        self._excluded += seconds

    def read(self, steps: int, waited: float) -> dict[str, float]:
        """Return the speed since the last reading, and begin a new interval."""
        elapsed = max(time.perf_counter() - self._started - self._excluded, 1e-9)
        done = steps - self._steps
        values = self._speed(elapsed / done, (waited - self._waited) / elapsed) if done else {}
        memory = peak_memory(self._devices)
        if memory is not None:
            values["memory_bytes"] = float(memory)
        self.restart(steps, waited)
        return values

    def _speed(self, seconds: float, wait_share: float) -> dict[str, float]:
        work = self._work
        values = {
            "step_seconds": seconds,
            "samples_per_second": work.samples / seconds,
            "input_wait_share": min(max(wait_share, 0.0), 1.0),
        }
        if work.tokens is not None:
            values["tokens_per_second"] = work.tokens / seconds
        if work.flops is not None:
            values["flops_per_second"] = work.flops / seconds
            if work.peak_flops is not None:
                values["mfu"] = work.flops / seconds / work.peak_flops
        return values


def peak_memory(devices: list[Any]) -> int | None:
    """Return the peak memory over these devices in bytes; None if they do not report it."""
    peaks = [
        stats.get("peak_bytes_in_use", stats.get("bytes_in_use", 0))
        for device in devices
        if device.process_index == jax.process_index() and (stats := memory_stats(device))
    ]
    return max(peaks) if peaks else None
