"""What a restarted process knows of the attempts before it, from its launcher."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

EARLIER_ATTEMPTS = "MESHWRIGHT_EARLIER_ATTEMPTS"
"""The environment variable with the earlier attempts, as JSON."""


@dataclass(frozen=True)
class EarlierAttempts:
    """The attempts of a run before this one.

    Attributes:
        count: how many there were.
        started: when the launcher started, in seconds since 1970; None without a launcher.
        useful: seconds of their updates whose results were kept.
        run_dir: the run folder; empty if none was known.
    """

    count: int = 0
    started: float | None = None
    useful: float = 0.0
    run_dir: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> EarlierAttempts:
        """Return what the launcher says; no attempts if it says nothing."""
        text = (os.environ if environ is None else environ).get(EARLIER_ATTEMPTS, "")
        return cls(**json.loads(text)) if text else cls()

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable for the next attempt."""
        return {EARLIER_ATTEMPTS: json.dumps(asdict(self))}

    @property
    def folder(self) -> Path | None:
        """The run folder to go on in; None to choose one."""
        return Path(self.run_dir) if self.run_dir else None

    def goodput(self, useful: float, seconds: float) -> float:
        """Return the share of the time since the launcher started that was spent on updates kept.

        Args:
            useful: seconds of this attempt's updates.
            seconds: seconds since the attempt began, which count without a launcher.
        """
        wall = seconds if self.started is None else time.time() - self.started
        return min((self.useful + useful) / max(wall, 1e-9), 1.0)
