"""The meter: how fast a run goes, between two looks at it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one update is.

    Attributes:
        samples: samples of the global batch.
        tokens: tokens of the global batch; None where samples are no sequences of tokens.
        flops: floating-point operations of one update; None if not counted.
        peak_flops: what all devices together can do in a second; None if not known.
    """

    samples: int
    tokens: int | None = None
    flops: int | None = None
    peak_flops: float | None = None


class Meter:
    """Measures updates between two readings; time that is no training can be left out.

    Args:
        work: what one update is.
        devices: whose memory is looked at.
    """

    def __init__(self, work: Work, devices: list[Any]) -> None:
        self._work = work
        self._devices = devices
        self._started = time.perf_counter()
        self._apart = self._waited = 0.0
        self._updates = 0

    def restart(self, updates: int, waited: float) -> None:
        """Begin a new interval after so many updates and seconds of waiting for data."""
        self._started = time.perf_counter()
        self._apart = 0.0
        self._updates, self._waited = updates, waited

    def leave_out(self, seconds: float) -> None:
        """Leave time out of the interval that was spent on something else."""
        self._apart += seconds

    def read(self, updates: int, waited: float) -> dict[str, float]:
        """Return the speed since the last reading, and begin a new interval."""
        elapsed = max(time.perf_counter() - self._started - self._apart, 1e-9)
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
    """Return the most bytes any of these devices has held; None where devices do not say."""
    found = [
        stats.get("peak_bytes_in_use", stats.get("bytes_in_use", 0))
        for device in devices
        if device.process_index == jax.process_index() and (stats := device.memory_stats())
    ]
    return max(found) if found else None
