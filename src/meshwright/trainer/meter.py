"""The meter: training speed between two logged updates."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one update.

    Attributes:
        samples: samples per global batch.
        tokens: tokens per global batch; None if samples are not token sequences.
        flops: floating-point operations per update; None if not counted.
        peak_flops: peak of all devices together, per second; None if not known.
    """

    samples: int
    tokens: int | None = None
    flops: int | None = None
    peak_flops: float | None = None


class Meter:
    """Measures speed between two readings; time spent on other things can be excluded.

    Args:
        work: the work of one update.
        devices: devices whose memory is measured.
    """

    def __init__(self, work: Work, devices: list[Any]) -> None:
        self._work = work
        self._devices = devices
        self._started = time.perf_counter()
        self._excluded = self._waited = 0.0
        self._updates = 0

    def restart(self, updates: int, waited: float) -> None:
        """Begin an interval, given the updates done and the seconds spent waiting for data."""
        self._started = time.perf_counter()
        self._excluded = 0.0
        self._updates, self._waited = updates, waited

    def exclude(self, seconds: float) -> None:
        """Exclude time spent on something other than training."""
        self._excluded += seconds

    def read(self, updates: int, waited: float) -> dict[str, float]:
        """Return the speed since the last reading, and begin a new interval."""
        elapsed = max(time.perf_counter() - self._started - self._excluded, 1e-9)
        done = updates - self._updates
        values = self._speed(elapsed / done, (waited - self._waited) / elapsed) if done else {}
        memory = peak_memory(self._devices)
        if memory is not None:
            values["memory_bytes"] = float(memory)
        self.restart(updates, waited)
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
        if device.process_index == jax.process_index() and (stats := device.memory_stats())
    ]
    return max(peaks) if peaks else None
