"""The run folder: made by process 0, checked for access and space, and locked by one run."""

import atexit
import fcntl
import itertools
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint import FOLDER, CheckpointReader
from meshwright.config.schema import CheckpointConfig
from meshwright.errors import ANY, Setting, UserError
from meshwright.processes import attempt_on_main, broadcast, is_main
from meshwright.runtime.host_machine import process_stat
from meshwright.step.canonical import CanonicalState
from meshwright.text.json_text import read_object
from meshwright.text.units import counted, human_bytes

logger = logging.getLogger("meshwright.trainer")

FILE = "run.lock"
_ATTEMPTS = 5
_WRITING_SECONDS = 0.2
"""How long to wait for a lock file that is still empty: its process may be writing it."""
_ABANDONED_SECONDS = 10.0
"""How old a lock file without content is whose process does not write it any more."""


@contextmanager
def claimed_folder(folder: Path) -> Generator[Path]:
    """Yield a new folder for this run: the one given, or if it exists one with a number.

    Runs that start in the same second are given the same name. What is still empty after the
    block is removed again.
    """
    made: list[Path] = []
    claimed = ""
    if is_main():
        # Whoever cannot write here gets a clear error once the folder is needed.
        with suppress(OSError):
            claimed = str(_claim(folder, made))
    try:
        yield Path(broadcast(claimed or str(folder)))
    finally:
        with suppress(OSError):
            for path in reversed(made):
                path.rmdir()


def _claim(folder: Path, made: list[Path]) -> Path:
    """Make a new folder and return it; note all folders that were made, the outermost first."""
    for parent in reversed(folder.parents):
        with suppress(FileExistsError):
            parent.mkdir()
            made.append(parent)
    for number in itertools.count(1):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            made.append(path)
            return path
    raise AssertionError("there is always another number")


def make_run_folder(folder: Path) -> None:
    """Make the folder on process 0, and check that it can be written to."""

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # An existing folder need not be writable.
        with tempfile.TemporaryFile(dir=folder):
            pass

    _on_main(folder, make)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into the folder on process 0, by name; no files, no folder."""
    if not files:
        return

    def write() -> None:
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    _on_main(folder, write)


def write_arrays(file: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to a file that is whole or not there."""
    file.parent.mkdir(exist_ok=True)
    beside = file.with_suffix(".tmp")
    with open(beside, "wb") as opened:
        np.savez(opened, allow_pickle=False, **arrays)
    beside.replace(file)


def _on_main(folder: Path, act: Callable[[], None]) -> None:
    """Act on process 0; raise the same error on all processes if that fails."""
    if problem := attempt_on_main(act):
        raise UserError(
            f"cannot write the output directory {folder.absolute()}",
            why=problem,
            fix=f"write {Setting('hydra.run.dir', ANY)} with a directory you can write to",
        )


def check_disk_space(folder: Path, structs: CanonicalState, config: CheckpointConfig) -> list[str]:
    """Refuse a disk without room for a checkpoint; return a warning if not all kept ones fit."""
    if not config.enabled:
        return []
    needed = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(structs))
    # Process 0 decides for all processes, so that they continue or end together.
    free = int(broadcast(shutil.disk_usage(folder).free if is_main() else 0))
    if free < needed:
        raise UserError(
            f"there is no room for a checkpoint in {folder}",
            why=f"it takes {human_bytes(needed)}, and {human_bytes(free)} are free",
            fix=f"free disk space, write {Setting('hydra.run.dir', ANY)} with a folder on another "
            f"disk, or {Setting('checkpoint.enabled', False)}",
        )
    # One more than are kept, while it is being written.
    most = config.keep_last + config.keep_best + 1
    more = max(most - len(CheckpointReader(folder / FOLDER).steps()), 1)
    if free >= more * needed:
        return []
    return [
        f"the disk may get full: up to {counted(more, 'more checkpoint')} of {human_bytes(needed)} "
        f"will be in {folder}, where {human_bytes(free)} are free; "
        f"{Setting('checkpoint.keep_last', 1)} keeps fewer"
    ]


class RunLock:
    """Locks a run folder for this run; every process must make the same calls.

    Process 0 creates the lock file, with its host and process. The lock of a process that no
    longer runs on this host is replaced, and so is one that this job of SLURM left on any host
    before it was requeued.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def acquire(self) -> None:
        """Create the lock file; raise if another run has the folder, or it cannot be written."""
        found: list[str] = []
        _on_main(self._path.parent, lambda: found.append(_try_to_lock(self._path)))
        problem = broadcast(found[0] if is_main() else "")
        if problem:
            _raise(self._path, problem)
        if is_main():
            # A run that ends in a way it does not see still removes its lock.
            atexit.register(self.release)

    def release(self) -> None:
        """Remove the lock file if it is this process's own; safe to call again."""
        if is_main():
            atexit.unregister(self.release)
            holder = read_object(self._path)
            if holder == _this_process(holder):
                self._path.unlink(missing_ok=True)


def refuse_locked(folder: Path) -> None:
    """Raise if another process has the folder, without locking it."""
    path = folder / FILE
    holder = read_object(path) if is_main() else {}
    free = not holder or holder == _this_process(holder) or _is_stale(holder)
    problem = broadcast("" if free else _describe(holder))
    if problem:
        _raise(path, problem)


def _try_to_lock(path: Path) -> str:
    """Return why the folder cannot be locked; empty if it is."""
    for _ in range(_ATTEMPTS):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            holder = read_object(path)
            if not holder:
                if not _replace_unreadable(path):
                    time.sleep(_WRITING_SECONDS)
            elif not _is_stale(holder):
                return _describe(holder)
            else:
                _remove_stale(path, holder)
            continue
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(_this_process({"since": time.strftime("%Y-%m-%d %H:%M:%S")})))
        except OSError:
            # A lock without content, as on a full disk, would lock its own user out.
            path.unlink(missing_ok=True)
            raise
        return ""
    return f"an unknown process: {path.name} says nothing about it, or cannot be read"


def _replace_unreadable(path: Path) -> bool:
    """Remove a lock file that nobody has completed, and say so; False if it cannot be read."""
    try:
        path.read_bytes()
        age = time.time() - path.stat().st_mtime
    except OSError:
        age = 0.0
    if age < _ABANDONED_SECONDS:
        return False
    logger.warning(
        "%s says nothing about its process, which ended before it had written it (a full disk?): "
        "it is replaced",
        path,
    )
    _remove_stale(path, {})
    return True


def _remove_stale(path: Path, holder: dict[str, Any]) -> None:
    """Remove the lock of a dead process, unless another process has replaced it meanwhile."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever waited here holds the old file; only the first finds it still in place.
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino and read_object(path) == holder:
                path.unlink()
    except FileNotFoundError:
        return


def _this_process(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a lock of this process holds, with the given time."""
    job, restart = _slurm_job()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "since": values.get("since", ""),
        **({"job": job, "restart": restart} if job else {}),
    }


def _slurm_job() -> tuple[str, int]:
    """Return SLURM's name of the job and how often it has been requeued; no name outside of it."""
    job, restart = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return f"{cluster} {job}".strip() if job else "", int(restart) if restart.isdecimal() else 0


def _is_stale(holder: dict[str, Any]) -> bool:
    """Whether the process of a lock is known not to run any more."""
    job, restart = _slurm_job()
    if job and holder.get("job") == job and int(holder.get("restart", 0)) < restart:
        # When this job was requeued, all its processes ended.
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
    except OSError:
        return ""
    facts = process_stat(pid)
    return f"{boot} {facts[19]}" if facts else ""


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
