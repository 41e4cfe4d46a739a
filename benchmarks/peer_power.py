"""The clocks and the power of a GPU while something runs on it, as nvidia-smi tells them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

_FIELDS = "clocks.sm,power.draw,temperature.gpu"
_EVERY_MS = 250


@dataclass(frozen=True)
class Sample:
    """What was read at one time.

    Attributes:
        time: seconds since the epoch.
        mhz: the clock of the multiprocessors.
        watts: the power.
        celsius: the temperature.
    """

    time: float
    mhz: float
    watts: float
    celsius: float


class PowerMeter:
    """Reads the first GPU four times a second; without one it reads nothing."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi") is None:
            return
        query = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
        command = [*query, "-i", "0", f"-lms={_EVERY_MS}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def during(self, turns: list[dict[str, Any]], units: float) -> dict[str, Any]:
        """Return the clocks and the power of some turns, and joules per unit of work.

        Args:
            turns: each with when it began and ended.
            units: the work that was done in them.
        """
        spans = [(turn["began"], turn["ended"]) for turn in turns]
        # The power that is shown is an average over the last second.
        read = [s for s in self.samples for a, b in spans if a + 1 <= s.time <= b]
        if not read:
            return {}
        watts = statistics.mean(sample.watts for sample in read)
        seconds = sum(turn["seconds"] for turn in turns)
        return {
            "sm_mhz": round(statistics.mean(sample.mhz for sample in read)),
            "watts": round(watts),
            "celsius": round(max(sample.celsius for sample in read)),
            "joules_per_1000": round(1000 * watts * seconds / units, 3),
        }

    def end(self) -> None:
        """Stop reading."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                mhz, watts, celsius = (float(word) for word in line.split(","))
            except ValueError:
                continue
            self.samples.append(Sample(time.time(), mhz, watts, celsius))
