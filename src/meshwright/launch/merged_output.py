"""What launched processes print: every line with its process's number, equal errors once."""

from __future__ import annotations

import re
import threading
from typing import IO

_ERROR = re.compile(rb"(internal )?error: ")
_GLOO_CONNECTED = b"[Gloo] Rank "
"""How Gloo tells on stdout, once per device, that it could connect; failures are exceptions."""
_LOST = b"Terminating process because the JAX distributed service detected fatal errors"
_CRASH_DUMP = re.compile(
    rb"[IWEF]\d{4} [\d:.]+ +\d+ (preemption_\w+\.cc|coordination_\w+\.cc|client\.h)"
    rb"|Additional GRPC error information|:UNKNOWN:Error received|RPC: /"
    rb"|\*\*\* Check failure stack trace|\s+@ +0x"
)
"""How JAX ends a process whose peers are gone: pages of its insides."""


class MergedOutput:
    """Passes the lines of several processes on to one stream, whole lines at a time.

    An error that several processes report alike is shown once. Errors are those of our own
    command line: a line ``error: …`` and the indented lines after it. Gloo's greetings are left
    out, and what JAX writes about lost peers is one line.
    """

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._errors: set[bytes] = set()

    def pump(self, rank: int, source: IO[bytes]) -> None:
        """Pass on everything a process prints until it closes the stream."""
        repeated = False
        for line in source:
            with self._lock:
                if _ERROR.match(line):
                    repeated = line in self._errors
                    self._errors.add(line)
                elif not line.startswith(b"  "):
                    repeated = False
                if _LOST in line:
                    line = b"lost its connection to the other processes\n"
                if not (repeated or line.startswith(_GLOO_CONNECTED) or _CRASH_DUMP.match(line)):
                    self._write(b"[%d] %s" % (rank, line))

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        with self._lock:
            self._write(text.encode(errors="backslashreplace"))

    def _write(self, line: bytes) -> None:
        try:
            self._target.write(line if line.endswith(b"\n") else line + b"\n")
            self._target.flush()
        except (BrokenPipeError, ValueError):
            # Nobody reads any more; the processes go on, and their exit codes still count.
            pass
