"""Building an entry of the cache in one process, while all others wait and see its progress."""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright.data.cache_entry import Damaged, Entry, PartialEntry, open_entry
from meshwright.errors import EnvironmentProblem, Setting
from meshwright.runtime.activity import activity
from meshwright.text.units import human_bytes, human_seconds

POLL_SECONDS = 0.2
"""How often a waiting process checks again."""
STATUS_SECONDS = 1.0
"""How often the builder writes its progress."""

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class BuildLock:
    """A lock that the system releases when its process ends, for whatever reason.

    Its last holder removes the file. Some file systems have no locks: those are not exclusive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exclusive = True
        self._descriptor: int | None = None
        self._reported = 0.0

    @contextmanager
    def held(self, report: Callable[[str], object]) -> Generator[None]:
        """Hold the lock inside; while another process has it, report which, and its progress."""
        while not self.acquire():
            report(self.holder())
            time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> bool:
        """Take the lock if it is free; return whether this process has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            opened.callback(os.close, descriptor)
            if not self._lock(descriptor):
                return False
            opened.pop_all()
        self._descriptor = descriptor
        self.say("starting")
        return True

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            # Removed while it is still locked, so that no one can lock a file without a name.
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def say(self, progress: str) -> None:
        """Write the progress for those that wait, at most once per second."""
        if self._descriptor is None or time.monotonic() - self._reported < STATUS_SECONDS:
            return
        self._reported = time.monotonic()
        status = {"pid": os.getpid(), "host": socket.gethostname(), "progress": progress}
        text = json.dumps(status).encode()
        # Whoever waits sees the last status; the builder finds out about a full disk itself.
        with suppress(OSError):
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))

    def holder(self) -> str:
        """Return which process holds the lock, and its last progress."""
        try:
            status: dict[str, Any] = json.loads(self.path.read_text())
            where = "" if status["host"] == socket.gethostname() else f" on {status['host']}"
            return f"by process {status['pid']}{where}: {status['progress']}"
        except (OSError, ValueError, KeyError):
            return "by another process"

    def _lock(self, descriptor: int) -> bool:
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
            return os.stat(self.path).st_ino == os.fstat(descriptor).st_ino
        except FileNotFoundError:
            return False


logger = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REPORT_SECONDS = 0.25
ABANDONED_SECONDS = 7 * 24 * 3600
"""How long an unfinished entry is kept for another process to continue."""


class Progress:
    """Reports the progress of a build: in this process, and to those that wait."""

    def __init__(self, report: Callable[[str], None], lock: BuildLock) -> None:
        self.fraction = 0.0
        self._report, self._lock = report, lock
        self._started, self._at_start = time.monotonic(), 0.0
        self._reported = 0.0

    def start_at(self, done: float, total: float) -> None:
        """Continue where another build stopped."""
        self._started, self._at_start = time.monotonic(), done
        self.fraction = done / max(total, 1)

    def __call__(self, done: float, total: float) -> None:
        """Report how many bytes of the total are done."""
        self.fraction = done / max(total, 1)
        now = time.monotonic()
        if now - self._reported < REPORT_SECONDS and done < total:
            return
        self._reported = now
        rate = (done - self._at_start) / max(now - self._started, 1e-3)
        parts = [f"{human_bytes(done)} of {human_bytes(total)}", f"{human_bytes(rate)}/s"]
        if done < total and rate:
            parts.append(f"{human_seconds((total - done) / rate)} left")
        self._report(", ".join(parts))
        self._lock.say(", ".join(parts))


Write = Callable[[PartialEntry, Progress], dict[str, Any]]
"""Writes the arrays of an entry, reports its progress, and returns facts to store with it."""


def build_once(folder: Path, what: str, dtypes: Mapping[str, Any], write: Write) -> Entry:
    """Return the entry of a folder; if there is none, build it, or wait until another process has.

    An OSError says that there is none, and the folder cannot be written to.
    """
    with suppress(Damaged):
        if entry := open_entry(folder):
            return entry
    lock = BuildLock(folder.with_name(f"{folder.name}.lock"))
    with activity(what) as report, lock.held(report):
        try:
            # Another process may have built it in the meantime.
            if entry := open_entry(folder):
                return entry
        except Damaged as error:
            logger.warning("%s; it is rewritten", error)
            _remove(folder)
        remove_abandoned(folder.parent)
        own = "" if lock.exclusive else f"-{socket.gethostname()}-{os.getpid()}"
        partial = PartialEntry(folder.with_name(f"{folder.name}.partial{own}"), dtypes)
        _build(folder, partial, write, Progress(report, lock))
        entry = open_entry(folder)
        assert entry is not None, "it was just written"
        return entry


def remove_abandoned(root: Path) -> None:
    """Remove what writers left behind long ago and no one continued."""
    for partial in root.glob("*.partial*"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _build(folder: Path, entry: PartialEntry, write: Write, progress: Progress) -> None:
    try:
        entry.commit(folder, write(entry, progress))
    except OSError as error:
        if error.errno not in _FULL:
            raise
        entry.close()
        _remove(entry.folder)
        raise _disk_full(folder.parent, error, entry.size, progress.fraction) from error
    finally:
        entry.close()


def _disk_full(root: Path, error: OSError, written: int, fraction: float) -> EnvironmentProblem:
    needed = human_bytes(written / max(fraction, 1e-6) if fraction < 1 else written)
    free = human_bytes(shutil.disk_usage(root).free)
    return EnvironmentProblem(
        f"the tokens of the data cannot be stored in {root}",
        why=f"{error.strerror}: about {needed} are needed, and {free} are free",
        fix=f"free space there, or name a folder on another disk: {Setting('data.cache_dir', '…')}",
    )


def _remove(folder: Path) -> None:
    """Remove a folder so that it is never seen half removed under its name."""
    aside = folder.with_name(f"{folder.name}.removed-{os.getpid()}")
    with suppress(OSError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
