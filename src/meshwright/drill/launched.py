"""A launch of a drill: what its processes print, how they end, and what is left of the run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from meshwright.checkpoint.check import check_checkpoints
from meshwright.checkpoint.reader import FOLDER, CheckpointReader
from meshwright.drill.process import BATCH, INJECTED, LAUNCHED, read_notes
from meshwright.launch.supervise import exit_code, guarded_group
from meshwright.runtime.host_machine import process_stat
from meshwright.tracking.run_files import read_lines

LEAVE_SECONDS = 10.0
"""How long processes may take to be gone after their launcher."""

_ENDED = "ZX"
"""States of processes that have ended, but whose exit code has not been read yet."""


@dataclass(frozen=True)
class Line:
    """A line that was printed, and when, in seconds since 1970."""

    time: float
    text: str


@dataclass(frozen=True)
class Launched:
    """A launch that has ended, when, and what was printed; its processes left notes in a folder."""

    code: int
    lines: Sequence[Line]
    ended: float
    notes: Path

    @property
    def processes(self) -> list[dict[str, Any]]:
        """What the processes noted when they started."""
        return read_notes(self.notes, LAUNCHED)

    @property
    def injected(self) -> list[dict[str, Any]]:
        """What the processes noted when the fault was injected."""
        return read_notes(self.notes, INJECTED)

    @property
    def batch_dtypes(self) -> list[str]:
        """The dtypes of a batch."""
        return [dtype for note in read_notes(self.notes, BATCH) for dtype in note["dtypes"]]

    @property
    def fault_time(self) -> float:
        """When the fault was injected; raise if it was not."""
        if not self.injected:
            problem = self.problem()
            raise NotSurvived(f"the fault was not injected: exit code {self.code}, {problem}")
        return min(note["time"] for note in self.injected)

    def check_code(self, *codes: int) -> None:
        """Raise unless it ended with one of these exit codes."""
        if self.code not in codes:
            wanted = " or ".join(map(str, codes))
            raise NotSurvived(f"exit code {self.code} instead of {wanted}: {self.problem()}")

    def find(self, pattern: str) -> re.Match[str]:
        """Return what the first line with a pattern says; raise if there is none."""
        return self._first(pattern)[1]

    def check_silent_about(self, pattern: str) -> None:
        """Raise if a line has a pattern."""
        for line in self.lines:
            if re.search(pattern, line.text):
                raise NotSurvived(f"it prints {line.text.strip()!r}")

    def noticed(self, pattern: str, within: float) -> float:
        """Return the seconds from the fault to the first such line; raise if it came too late."""
        line, _ = self._first(pattern)
        seconds = line.time - self.fault_time
        if seconds > within:
            raise NotSurvived(f"noticed after {seconds:.1f} s, more than {within:g} s")
        return max(seconds, 0.0)

    def check_none_lost(self, step: int) -> None:
        """Raise if training went on from an earlier checkpoint than the newest committed one."""
        newest = max((max(note["committed"], default=0) for note in self.injected), default=0)
        if step < newest:
            raise NotSurvived(f"went on from step {step}, though step {newest} was committed")

    def stopped(self, within: float) -> float:
        """Return the seconds from the fault to the end; raise if it took too long."""
        seconds = self.ended - self.fault_time
        if seconds > within:
            raise NotSurvived(f"ended {seconds:.1f} s after the fault, more than {within:g} s")
        return seconds

    def problem(self) -> str:
        """Return the first error that was printed, or the last line."""
        texts = [line.text for line in self.lines if line.text.strip()]
        errors = [text for text in texts if re.match(r"(\[\d+\] )?(internal )?error: ", text)]
        return (errors or texts[-1:] or ["nothing was printed"])[0].strip()

    def message(self) -> str:
        """Return the first error with the lines that explain it."""
        first = self.problem()
        texts = [line.text.rstrip() for line in self.lines]
        at = next((n for n, text in enumerate(texts) if text.strip() == first), len(texts))
        prefix = found[0] if (found := re.match(r"\[\d+\] ", first)) else ""
        own = (text for text in texts[at + 1 :] if text.startswith(prefix))
        rest = itertools.takewhile(lambda text: text.startswith(f"{prefix}  "), own)
        return "\n".join([first, *(text.removeprefix(prefix).strip() for text in rest)])

    def _first(self, pattern: str) -> tuple[Line, re.Match[str]]:
        for line in self.lines:
            if found := re.search(pattern, line.text):
                return line, found
        raise NotSurvived(f"no line says {pattern!r}: {self.problem()}")


def launch(
    words: Sequence[str], environ: Mapping[str, str], log: Path, notes: Path, seconds: float
) -> Launched:
    """Run ``meshwright launch`` with some words until it ends, or is killed after some seconds."""
    lines: list[Line] = []
    # The launcher ends with this process, also if that is killed, and its processes with it.
    with guarded_group(Path(tempfile.mkdtemp(prefix="meshwright-drill-group-"))) as group:
        launcher = subprocess.Popen(
            [sys.executable, "-P", "-m", "meshwright", "launch", *words],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=group,
        )
        assert launcher.stdout is not None
        pump = threading.Thread(target=_read, args=(launcher.stdout, lines, log), daemon=True)
        pump.start()
        try:
            returncode = launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            raise NotSurvived(f"it did not end within {seconds:.0f} s") from None
        ended = time.time()
    # Processes that outlive their launcher hold the pipe; they are found by their notes.
    pump.join(5.0)
    return Launched(exit_code(returncode), lines, ended, notes)


def _read(source: IO[bytes], lines: list[Line], log: Path) -> None:
    with log.open("ab") as file:
        for line in source:
            lines.append(Line(time.time(), line.decode(errors="replace").rstrip("\n")))
            file.write(line)
            file.flush()


def running_in(groups: Collection[int]) -> list[int]:
    """Return the process groups in which something still runs, after some time to leave."""
    ends = time.monotonic() + LEAVE_SECONDS
    while (left := [group for group in groups if _runs(group)]) and time.monotonic() < ends:
        time.sleep(0.05)
    return left


def is_free(port: int) -> bool:
    """Whether a port of this machine can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        # The number has been given to a process of another user.
        return False
    members = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    each = (process_stat(pid)[:3] for pid in members)
    # State, parent and group.
    return not members or any(f[2:] == [str(group)] and f[0] not in _ENDED for f in each)


class NotSurvived(Exception):
    """The outcome of a fault is not the expected one; the message says what is wrong."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a drilled run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / FOLDER

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint."""
        return CheckpointReader(self.checkpoints).steps()

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the run: its mesh, its precision and more."""
        return yaml.safe_load((self.path / "plan.yaml").read_text(encoding="utf-8"))

    def losses(self) -> list[tuple[int, float]]:
        """Return the loss of every step, in the order in which they were written."""
        rows = self._rows("metrics")
        return [(row["step"], row["loss"]) for row in rows if row["split"] == "train"]

    def step_seconds(self) -> float:
        """Return the time of a step."""
        seconds = [row["step_seconds"] for row in self._rows("metrics") if "step_seconds" in row]
        return statistics.median(seconds) if seconds else 0.0

    def save_seconds(self) -> float:
        """Return the time of a save."""
        saves = [row["seconds"] for row in self._rows("events") if row["kind"] == "checkpoint"]
        return statistics.median(saves) if saves else 0.0

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return list(read_lines(self.path / f"{name}.jsonl"))

    def copy_until(self, step: int, folder: Path) -> None:
        """Copy the run as it was after the checkpoint of a step."""
        shutil.copytree(self.path, folder)
        copy = RunFolder(folder)
        for later in [each for each in copy.steps if each > step]:
            shutil.rmtree(copy.checkpoints / str(later))
        for name in ("metrics", "events"):
            rows = [row for row in copy._rows(name) if row["step"] <= step]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (folder / "result.json").unlink(missing_ok=True)

    def check_checkpoints(self, committed: Collection[int] = ()) -> None:
        """Raise if a checkpoint that is listed is not whole, or if a committed one is gone."""
        if lost := sorted(set(committed) - set(self.steps)):
            raise NotSurvived(f"the committed checkpoint of step {lost[0]} is gone")
        for checked in check_checkpoints(self.checkpoints):
            if checked.verdict == "damaged":
                raise NotSurvived(f"checkpoint {checked.step} is listed, but {checked.problem}")

    def check_swept(self) -> None:
        """Raise if something partial has been left in the folder of checkpoints."""
        for path in self.checkpoints.iterdir():
            if path.is_dir() and not path.name.isdecimal() and not path.name.endswith(".damaged"):
                raise NotSurvived(f"{path.name} is left in {FOLDER}/")

    def check_same(self, other: RunFolder) -> None:
        """Raise unless every loss and the final state equal those of another run, bit for bit."""
        expected = self._expected(other)
        for step, loss in self.losses():
            if loss != expected.get(step):
                raise NotSurvived(
                    f"the loss of step {step} is {loss!r} instead of {expected.get(step)!r}"
                )
        own, its = (
            dict(CheckpointReader(run.checkpoints).checksums(run.steps[-1]).arrays)
            for run in (self, other)
        )
        if different := sorted(name for name in its if own.get(name) != its[name]):
            raise NotSurvived(f"the losses are equal, but {different[0]} is not at the end")

    def difference(self, other: RunFolder) -> float:
        """Return the largest relative difference of losses; raise if steps are missing."""
        expected, found = self._expected(other), dict(self.losses())
        return max(
            abs(found[step] - loss) / max(abs(loss), 1e-30) for step, loss in expected.items()
        )

    def _expected(self, other: RunFolder) -> dict[int, float]:
        """Return the losses of another run; raise if this one has not done all of its steps."""
        expected = dict(other.losses())
        if missing := sorted(set(expected) - set(dict(self.losses()))):
            raise NotSurvived(f"step {missing[0]} was not done")
        return expected
