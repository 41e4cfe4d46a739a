"""What a launcher and its processes exchange, besides heartbeats.

The launcher sets environment variables: the earlier attempts, and how many processes may be left.
A process writes a report beside its heartbeat: its run folder, and why it ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshwright.text.json_text import write_atomically

EARLIER_ATTEMPTS = "MESHWRIGHT_EARLIER_ATTEMPTS"
"""The environment variable with the earlier attempts, as JSON."""
PROCESS_RANGE = "MESHWRIGHT_PROCESS_RANGE"
"""The environment variable with the numbers of processes that a run may have, as JSON."""


@dataclass(frozen=True)
class EarlierAttempts:
    """The attempts of a run before this one, and how the last one failed.

    ``started`` is when the launcher did, in seconds since 1970; ``useful`` are the seconds of
    steps whose results were kept.
    """

    count: int = 0
    started: float | None = None
    useful: float = 0.0
    run_dir: str = ""
    failure: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> EarlierAttempts:
        """Return what the launcher has set; no attempts without a launcher."""
        text = (os.environ if environ is None else environ).get(EARLIER_ATTEMPTS, "")
        return cls(**json.loads(text)) if text else cls()

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable for the next attempt."""
        return {EARLIER_ATTEMPTS: json.dumps(asdict(self))}

    @property
    def folder(self) -> Path | None:
        """The run folder to continue in; None to choose one."""
        return Path(self.run_dir) if self.run_dir else None

    def goodput(self, useful: float, seconds: float) -> float:
        """Return the share of the time since the launcher started that was spent on steps kept.

        Without a launcher, the seconds since this attempt began count.
        """
        wall = seconds if self.started is None else time.time() - self.started
        return min((self.useful + useful) / max(wall, 1e-9), 1.0)


@dataclass(frozen=True)
class ProcessRange:
    """The numbers of processes that a run may have: it continues if some do not come back.

    ``step`` is how many are lost together: the processes of a machine, or 1.
    """

    full: int
    least: int
    step: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ProcessRange | None:
        """Return what the launcher has set; None if all processes are needed."""
        text = (os.environ if environ is None else environ).get(PROCESS_RANGE, "")
        return cls(**json.loads(text)) if text else None

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable for processes."""
        return {PROCESS_RANGE: json.dumps(asdict(self))}

    @property
    def counts(self) -> range:
        """The numbers of processes, the largest first."""
        return range(self.full, self.least - 1, -self.step)


@dataclass(frozen=True)
class Fit:
    """The mesh with which a run can continue, or why there is none."""

    mesh: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Report:
    """What a process reports to its launcher; ``fits`` has meshes by number of processes.

    ``lost_peer`` says that it ends only because another process is gone.
    """

    run_dir: str = ""
    fits: Mapping[int, Fit] = field(default_factory=dict[int, Fit])
    error: str = ""
    lost_peer: bool = False
    absent: tuple[int, ...] = ()

    def write(self, file: Path) -> None:
        """Write the report; a reader sees all of it or none."""
        write_atomically(file, json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Report | None:
        """Return the report of a process; None if it has not written any."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            return None
        values["fits"] = {int(count): Fit(**fit) for count, fit in values["fits"].items()}
        values["absent"] = tuple(values["absent"])
        return cls(**values)
