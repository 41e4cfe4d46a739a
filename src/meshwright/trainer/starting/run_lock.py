"""The lock of a run folder: one run at a time writes to it."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import broadcast, is_main

FILE = "run.lock"
_ATTEMPTS = 5
_WRITING_SECONDS = 0.2
"""How long to wait for a lock file that is still empty: its process may be writing it."""


class RunLock:
    """Locks a run folder for this run; every process must make the same calls.

    Process 0 creates the lock file, with its host and process. The lock of a process that no
    longer runs on this host is replaced, and so is one that this job of SLURM left on any host
    before it was requeued.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def acquire(self) -> None:
        """Create the lock file; raise if another run has the folder, or it cannot be written."""
        problem = broadcast(_try_to_lock(self._path) if is_main() else "")
        if problem:
            _raise(self._path, problem)
        if is_main():
            # A run that ends in a way it does not see still removes its lock.
            atexit.register(self.release)

    def release(self) -> None:
        """Remove the lock file if it is this process's own; safe to call again."""
        if is_main():
            atexit.unregister(self.release)
            holder = _read(self._path)
            if holder == _this_process(holder):
                self._path.unlink(missing_ok=True)


def refuse_locked(folder: Path) -> None:
    """Raise if another process has the folder, without locking it."""
    path = folder / FILE
    holder = _read(path) if is_main() else None
    free = holder is None or holder == _this_process(holder) or _is_stale(holder)
    problem = broadcast("" if holder is None or free else _describe(holder))
    if problem:
        _raise(path, problem)


def _try_to_lock(path: Path) -> str:
    """Return why the folder cannot be locked; empty if it is."""
    for _ in range(_ATTEMPTS):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            holder = _read(path)
            if holder is None:
                time.sleep(_WRITING_SECONDS)
            elif not _is_stale(holder):
                return _describe(holder)
            else:
                _remove_stale(path, holder)
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(_this_process({"since": time.strftime("%Y-%m-%d %H:%M:%S")})))
        return ""
    return "an unknown process: the lock file cannot be read"


def _remove_stale(path: Path, holder: dict[str, Any]) -> None:
    """Remove the lock of a dead process, unless another process has replaced it meanwhile."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever waited here holds the old file; only the first finds it still in place.
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino and _read(path) == holder:
                path.unlink()
    except FileNotFoundError:
        return


def _this_process(values: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a lock of this process holds, with the given time."""
    job, restart = _slurm_job()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "since": (values or {}).get("since", ""),
        **({"job": job, "restart": restart} if job else {}),
    }


def _slurm_job() -> tuple[str, int]:
    """Return SLURM's name of the job and how often it has been requeued; no name outside of it."""
    job, restart = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return f"{cluster} {job}".strip() if job else "", int(restart) if restart.isdecimal() else 0


def _is_requeued(holder: dict[str, Any]) -> bool:
    """Whether this job has the lock since before it was requeued, when all its processes ended."""
    job, restart = _slurm_job()
    return bool(job) and holder.get("job") == job and int(holder.get("restart", 0)) < restart


def _is_stale(holder: dict[str, Any]) -> bool:
    """Whether the process of a lock is known not to run any more."""
    if _is_requeued(holder):
        return True
    if holder.get("host") != socket.gethostname():
        return False
    pid = int(holder.get("pid", 0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # It runs, as another user.
        pass
    # The number may have been given to another process.
    return holder.get("started") != _start_of(pid)


def _start_of(pid: int) -> str:
    """Return when a process started, as text to compare; empty if the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        # The name of the program, in parentheses, may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{boot} {fields[19]}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _describe(holder: dict[str, Any]) -> str:
    return (
        f"process {holder.get('pid')} on {holder.get('host')} has been writing to it since "
        f"{holder.get('since')}"
    )


def _raise(path: Path, problem: str) -> None:
    raise UserError(
        f"another run is using {path.parent}",
        why=problem,
        fix=f"wait for it, or write {Setting('hydra.run.dir', ANY)} with another folder; if that "
        f"process does not exist any more, remove {path}",
    )
