"""The merged output of launched processes: lines with their rank, equal errors once."""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from meshwright.processes.library_messages import (
    CRASH_DUMP,
    GLOO_CONNECTED,
    SILENT,
    SILENT_NUMBERS,
    TERMINATED,
    TRACEBACK_END,
)
from meshwright.runtime.attempts import Report

_ERROR = re.compile(rb"(internal )?error: ")


class MergedOutput:
    """Copies the lines of several processes to one stream, whole lines at a time.

    An error that several processes report is shown once. Errors are those of Meshwright's command
    line: a line ``error: …`` and the indented lines after it. Messages of Gloo about connections
    are left out, and those of JAX about lost peers become one line. What a process prints once it
    has lost another is kept until `release`, so that the error of the process that is gone comes
    first. Processes that gave no sign of life any more, as the others say, are ``silent``.
    """

    def __init__(
        self, target: IO[bytes], report_of: Callable[[int], Report] = lambda _: Report()
    ) -> None:
        self._target, self._report_of = target, report_of
        self._lock = threading.Lock()
        self._errors: set[bytes] = set()
        self._held: list[bytes] = []
        self._raised: dict[int, str] = {}
        self._terminated: set[int] = set()
        self.silent: set[int] = set()

    def pump(self, rank: int, source: IO[bytes]) -> None:
        """Copy everything a process prints until it closes the stream."""
        repeated = silent = False
        for line in source:
            with self._lock:
                if silent and SILENT_NUMBERS.match(line):
                    self.silent |= {int(number) for number in re.findall(rb"\d+", line)}
                    continue
                silent = SILENT in line
                self._note(rank, line)
                if TERMINATED in line:
                    line = b"lost its connection to the other processes\n"
                if _ERROR.match(line):
                    repeated = line in self._errors
                    self._errors.add(line)
                elif not line.startswith(b"  "):
                    repeated = False
                if repeated or line.startswith(GLOO_CONNECTED) or CRASH_DUMP.match(line):
                    continue
                shown = b"[%d] %s" % (rank, line)
                self._held.append(shown) if self.is_left_behind(rank) else self._write(shown)

    def release(self) -> None:
        """Print what processes said after they had lost another."""
        with self._lock:
            for line in self._held:
                self._write(line)
            self._held.clear()

    def cause(self, rank: int) -> str:
        """Return why a process failed, in one line; empty if it has not said so."""
        return self._report_of(rank).error or self._raised.get(rank, "")

    def is_left_behind(self, rank: int) -> bool:
        """Whether a process fails only because another one is gone."""
        return rank in self._terminated or self._report_of(rank).lost_peer

    def _note(self, rank: int, line: bytes) -> None:
        """Remember what a library prints about the end of a process."""
        if TERMINATED in line and not self.cause(rank):
            self._terminated.add(rank)
        if TRACEBACK_END.match(line):
            self._raised.setdefault(rank, line.decode(errors="replace").strip())

    def notify(self, text: str) -> None:
        """Print a line that is marked as the launcher's."""
        self.say(f"launch: {text}")

    def say(self, text: str) -> None:
        """Print a line of the launcher itself."""
        with self._lock:
            self._write(text.encode(errors="backslashreplace"))

    def _write(self, line: bytes) -> None:
        # If the reader is gone, the processes continue, and their exit codes still count.
        with suppress(BrokenPipeError, ValueError):
            self._target.write(line if line.endswith(b"\n") else line + b"\n")
            self._target.flush()
