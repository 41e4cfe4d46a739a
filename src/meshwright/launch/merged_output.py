"""The merged output of launched processes: lines with their rank, equal errors once."""

from __future__ import annotations

import re
import threading
from typing import IO

_ERROR = re.compile(rb"(internal )?error: ")
_GLOO_CONNECTED = b"[Gloo] Rank "
"""What Gloo prints on stdout, once per device, when it has connected."""
_CAUSE = re.compile(rb"(?:internal )?error: (.+)|((?:\w+\.)*\w*(?:Error|Exception): .+)")
"""How a process says why it fails: Meshwright's own errors, and the end of a traceback."""
_CONSEQUENCE = re.compile(
    rb"error: process \d+ lost |lost its connection to the other processes"
    rb"|stop: failed: .*(Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED)"
)
"""What processes say because another one is gone."""
_LOST = b"Terminating process because the JAX distributed service detected fatal errors"
_CRASH_DUMP = re.compile(
    rb"[IWEF]\d{4} [\d:.]+ +\d+ (preemption_\w+\.cc|coordination_\w+\.cc|client\.h)"
    rb"|Additional GRPC error information|:UNKNOWN:Error received|RPC: /"
    rb"|\*\*\* Check failure stack trace|\s+@ +0x"
)
"""What JAX prints when it ends a process whose peers are gone."""


class MergedOutput:
    """Copies the lines of several processes to one stream, whole lines at a time.

    An error that several processes report is shown once. Errors are those of Meshwright's command
    line: a line ``error: …`` and the indented lines after it. Messages of Gloo about connections
    are left out, and those of JAX about lost peers become one line. Errors about a lost connection
    are kept until `release`, so that the error of the process that is gone comes first.

    Attributes:
        causes: by process, its first error.
    """

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._errors: set[bytes] = set()
        self._held: list[bytes] = []
        self.causes: dict[int, str] = {}

    def pump(self, rank: int, source: IO[bytes]) -> None:
        """Copy everything a process prints until it closes the stream."""
        repeated = held = False
        for line in source:
            with self._lock:
                if _LOST in line:
                    line = b"lost its connection to the other processes\n"
                self._note(rank, line)
                if _ERROR.match(line):
                    repeated = line in self._errors
                    self._errors.add(line)
                elif not line.startswith(b"  "):
                    repeated = False
                if not line.startswith(b"  "):
                    held = bool(_CONSEQUENCE.match(line))
                if repeated or line.startswith(_GLOO_CONNECTED) or _CRASH_DUMP.match(line):
                    continue
                shown = b"[%d] %s" % (rank, line)
                self._held.append(shown) if held else self._write(shown)

    def release(self) -> None:
        """Print the errors about lost connections."""
        with self._lock:
            for line in self._held:
                self._write(line)
            self._held.clear()

    def _note(self, rank: int, line: bytes) -> None:
        """Remember what the line says about the run."""
        if cause := _CAUSE.match(line):
            text = (cause[1] or cause[2]).decode(errors="replace").strip()
            self.causes.setdefault(rank, text)

    def say(self, text: str) -> None:
        """Print a line of the launcher itself."""
        with self._lock:
            self._write(text.encode(errors="backslashreplace"))

    def _write(self, line: bytes) -> None:
        try:
            self._target.write(line if line.endswith(b"\n") else line + b"\n")
            self._target.flush()
        except (BrokenPipeError, ValueError):
            # The reader is gone; the processes continue, and their exit codes still count.
            pass
