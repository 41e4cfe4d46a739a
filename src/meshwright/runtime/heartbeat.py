"""The heartbeat of a process: where its training loop is, and how its time divides.

Under `meshwright launch` it is written to a small file that the launcher reads. The training loop
writes it itself, so that it stops when the loop is stuck. The launcher can also ask for the Python
stacks of a process, even of one that holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import itertools
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from meshwright.runtime.attempts import Report

HEARTBEAT_FILE = "MESHWRIGHT_HEARTBEAT"
"""The environment variable with the file to write to; absent without a launcher."""
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a process write the stacks of its threads to the file ``<heartbeat>.stacks``."""


class Doing(IntEnum):
    """What a process is doing, as a number for the file and as text for people."""

    text: str

    def __new__(cls, number: int, text: str) -> Doing:
        """Make a number that has a text."""
        doing = int.__new__(cls, number)
        doing._value_, doing.text = number, text
        return doing

    STARTING = 0, "starting"
    COMPILING = 1, "compiling"
    INPUT = 2, "waiting for input"
    TRAINING = 3, "training"
    DISPATCHING = 4, "starting a step"
    WAITING = 5, "waiting for the devices"
    CALLBACKS = 6, "logging and callbacks"
    EVALUATING = 7, "evaluating"
    SAVING = 8, "saving"
    ENDED = 9, "done"


_OF_STEPS = (Doing.INPUT, Doing.TRAINING, Doing.DISPATCHING, Doing.WAITING, Doing.CALLBACKS)
# Native alignment, so that each number is written at once, and a reader never sees half of one.
_FORM = struct.Struct(f"@qqqqqdd{len(Doing)}d")
_ALIVE = struct.Struct("@q")
"""After the rest, since another thread writes it."""
_SIZE = _FORM.size + _ALIVE.size
ALIVE_SECONDS = 0.5
"""How often that thread writes: it stops only if the interpreter's lock is held."""


@dataclass(frozen=True)
class Beat:
    """One reading of a heartbeat.

    Attributes:
        count: marks so far; processes of one run make the same marks in the same order.
        step: the step it is at, or the last one.
        first: the step after which it began to train; -1 before.
        saved: the step whose state was last handed over to be saved; -1 before.
        saved_useful: seconds of steps up to then.
        time: when the last mark was made, by the clock of the machine.
        alive: counts as long as threads of the process get the interpreter's lock.
    """

    count: int = 0
    doing: Doing = Doing.STARTING
    step: int = 0
    first: int = -1
    saved: int = -1
    saved_useful: float = 0.0
    time: float = 0.0
    seconds: tuple[float, ...] = (0.0,) * len(Doing)
    alive: int = 0

    @property
    def useful(self) -> float:
        """Seconds spent on steps."""
        return sum(self.seconds[doing] for doing in _OF_STEPS)

    @property
    def own_work(self) -> float:
        """Seconds of steps in which the process worked itself, and waited for nothing."""
        return self.seconds[Doing.TRAINING] + self.seconds[Doing.CALLBACKS]

    @property
    def input_wait(self) -> float:
        """Seconds of steps in which the process waited for its data."""
        return self.seconds[Doing.INPUT]

    @classmethod
    def unpacked(cls, data: bytes) -> Beat:
        """Return the beat of some bytes."""
        count, doing, step, first, saved, saved_useful, at, *seconds = _FORM.unpack_from(data)
        alive = _ALIVE.unpack_from(data, _FORM.size)[0] if len(data) >= _SIZE else 0
        return cls(count, Doing(doing), step, first, saved, saved_useful, at, tuple(seconds), alive)


def read_beat(file: Path) -> Beat | None:
    """Return what a process wrote last; None if it has not begun."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    return Beat.unpacked(data) if len(data) >= _FORM.size else None


def stacks_file(heartbeat: Path) -> Path:
    """Return the file for the stacks of the process with this heartbeat."""
    return heartbeat.with_suffix(".stacks")


def report_file(heartbeat: Path) -> Path:
    """Return the file for the report of the process with this heartbeat."""
    return heartbeat.with_suffix(".report")


class Heartbeat:
    """Writes the heartbeat of this process, from the thread that trains, to a file if there is one.

    A mark costs about 2 µs, so the numbers are plain attributes instead of a `Beat`.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._report = file, Report()
        self._count = self.step = 0
        self._doing = Doing.STARTING
        self._first = self._saved = -1
        self._saved_useful = 0.0
        self._time = time.monotonic()
        self._seconds = [0.0] * len(Doing)
        self._began = 0.0
        self._target: Any = bytearray(_SIZE)
        if file is not None:
            # The signal must not end the process once the launcher sees the file.
            self._stacks = stacks_file(file).open("w", encoding="utf-8")
            faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
            self._write()
            file.write_bytes(self._target)
            with file.open("r+b") as opened:
                self._target = mmap.mmap(opened.fileno(), _SIZE)
            threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    @property
    def launched(self) -> bool:
        """Whether a launcher of ours watches this process."""
        return self._file is not None

    @property
    def useful(self) -> float:
        """Seconds spent on steps since the run began."""
        return self._useful() - self._began

    def begin(self) -> None:
        """Note that a run begins, which first compiles."""
        self._began, self._first, self._saved = self._useful(), -1, -1
        self.mark(Doing.COMPILING, 0)

    def report(self, **changes: Any) -> None:
        """Change fields of the report to the launcher; without a launcher, it is not written."""
        self._report = replace(self._report, **changes)
        if self._file is not None:
            # A disk that is full must not hide the error that is reported.
            with suppress(OSError):
                self._report.write(report_file(self._file))

    def start_from(self, step: int) -> None:
        """Note the step after which training begins."""
        self._first = step
        self.mark(Doing.TRAINING, step)

    def mark(self, doing: Doing, step: int | None = None) -> None:
        """Note what the process does from now on."""
        now = time.monotonic()
        self._seconds[self._doing] += now - self._time
        self._count += 1
        self._doing, self._time = doing, now
        if step is not None:
            self.step = step
        self._write()

    def tick(self) -> None:
        """Mark progress with the same work."""
        self.mark(self._doing)

    @contextmanager
    def during(self, doing: Doing) -> Generator[None]:
        """Mark the block; afterwards, what was done before continues."""
        before = self._doing
        self.mark(doing)
        try:
            yield
        finally:
            self.mark(before)

    def saved(self, step: int) -> None:
        """Note that the state after a step has been handed over to be saved."""
        self._saved, self._saved_useful = step, self._useful()
        self._write()

    def _live(self) -> None:
        for count in itertools.count(1):
            _ALIVE.pack_into(self._target, _FORM.size, count)
            time.sleep(ALIVE_SECONDS)

    def _useful(self) -> float:
        return sum(self._seconds[doing] for doing in _OF_STEPS)

    def _write(self) -> None:
        _FORM.pack_into(
            self._target,
            0,
            self._count,
            self._doing,
            self.step,
            self._first,
            self._saved,
            self._saved_useful,
            self._time,
            *self._seconds,
        )


class _Own:
    """The heartbeat of this process, once there is one."""

    heartbeat: Heartbeat | None = None


def own_heartbeat() -> Heartbeat:
    """Return the heartbeat of this process, which begins with the first call."""
    if _Own.heartbeat is None:
        # Processes that this one starts must not write to its file.
        name = os.environ.pop(HEARTBEAT_FILE, "")
        _Own.heartbeat = Heartbeat()
        with suppress(OSError):
            _Own.heartbeat = Heartbeat(Path(name) if name else None)
    return _Own.heartbeat
