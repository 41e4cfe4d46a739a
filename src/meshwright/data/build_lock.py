"""A lock on something that one process builds while others wait: who builds, and how far it is."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Not on Windows.
    fcntl = None

POLL_SECONDS = 0.2
"""How often a process that waits looks again."""
STATUS_SECONDS = 1.0
"""How often the builder says how far it is."""

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class BuildLock:
    """A lock that the system releases when its process ends, however it ends.

    Attributes:
        path: the lock's file, which is removed by whoever had the lock.
        exclusive: whether others are really kept out; some file systems have no locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exclusive = True
        self._descriptor: int | None = None
        self._told = 0.0

    @contextmanager
    def held(self, tell: Callable[[str], object]) -> Generator[None]:
        """Hold the lock inside; while another process has it, tell who, and how far it is."""
        while not self.acquire():
            tell(self.holder())
            time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> bool:
        """Take the lock if it is free; return whether this process has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not self._lock(descriptor):
                os.close(descriptor)
                return False
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.say("starting")
        return True

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            # Removed while it is still locked, so that nobody can lock a file without a name.
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def say(self, progress: str) -> None:
        """Tell those who wait how far this process is; at most once per second."""
        if self._descriptor is None or time.monotonic() - self._told < STATUS_SECONDS:
            return
        self._told = time.monotonic()
        status = {"pid": os.getpid(), "host": socket.gethostname(), "progress": progress}
        try:
            text = json.dumps(status).encode()
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))
        except OSError:
            # Whoever waits sees the last status; the builder finds out about a full disk itself.
            return

    def holder(self) -> str:
        """Return which process has the lock, and what it has said last."""
        try:
            status: dict[str, Any] = json.loads(self.path.read_text())
            where = "" if status["host"] == socket.gethostname() else f" on {status['host']}"
            return f"by process {status['pid']}{where}: {status['progress']}"
        except (OSError, ValueError, KeyError):
            return "by another process"

    def _lock(self, descriptor: int) -> bool:
        if fcntl is None:
            self.exclusive = False
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.exclusive = False
            return True
        # Its last owner may have removed the file after it was opened here.
        try:
            current = os.stat(self.path).st_ino
        except FileNotFoundError:
            return False
        return current == os.fstat(descriptor).st_ino
