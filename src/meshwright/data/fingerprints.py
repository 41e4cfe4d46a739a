"""Fingerprints of data, and digests of whole files that are recomputed only for changed files.

A digest covers every byte, because an edit that leaves the size as it is can be anywhere. It is
kept together with what the file system says about the file, its times and its inode, which change
with every write. Where a file lies is no part of its digest: a copy has the same one.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.data.build_once import BuildLock
from meshwright.errors import UserError
from meshwright.text.json_text import read_object, write_atomically
from meshwright.text.units import human_bytes


def fingerprint_of(*facts: Any) -> str:
    """Return 16 hex digits that identify these facts."""
    digest = hashlib.blake2b(digest_size=8)
    for fact in facts:
        digest.update(fact if isinstance(fact, bytes) else repr(fact).encode())
        digest.update(b"\0")
    return digest.hexdigest()


READ_BYTES = 2**20
SETTLED_SECONDS = 2.0
"""A file written to so recently could be written to again without its time changing."""

Report = Callable[[str], object]
Stamp = list[int]
"""Size, times and inode of a file."""


def digests(files: Sequence[Path], folder: Path, report: Report) -> list[str]:
    """Return the SHA-256 digest of each file; they are kept in the folder, if it can be written."""
    # By absolute name, with links unresolved: a link has the stamp of its target.
    names = [os.path.abspath(file) for file in files]
    memory = folder / f"{hashlib.sha256(repr(names).encode()).hexdigest()[:32]}.json"
    known = read_object(memory)
    if not _missing(names, known):
        return [known[name][1] for name in names]
    lock = BuildLock(memory.with_suffix(".lock"))
    try:
        with lock.held(report):
            # Another process may have computed them in the meantime.
            known = read_object(memory)
            known = _compute(names, known, lambda text: (report(text), lock.say(text)))
            _write(memory, known)
    except OSError:
        # Nothing can be written here, so no one else computes them for this process.
        known = _compute(names, known, report)
    return [known[name][1] for name in names]


def stamp(file: str | Path) -> Stamp:
    """Return what changes whenever a file is written to."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise UserError(f"cannot read {file}", why=error.strerror or str(error)) from error
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _missing(names: Sequence[str], known: dict[str, Any]) -> list[str]:
    return [name for name in names if name not in known or known[name][0] != stamp(name)]


def _compute(names: Sequence[str], known: dict[str, Any], report: Report) -> dict[str, Any]:
    missing = _missing(names, known)
    total, done = sum(os.path.getsize(name) for name in missing), 0
    for name in missing:
        before, digest = stamp(name), hashlib.sha256()
        try:
            with open(name, "rb", buffering=0) as content:
                while part := content.read(READ_BYTES):
                    digest.update(part)
                    done += len(part)
                    report(f"compared {human_bytes(done)} of {human_bytes(total)}")
        except OSError as error:
            raise UserError(f"cannot read {name}", why=error.strerror or str(error)) from error
        if stamp(name) != before:
            raise changed(name)
        known[name] = [before, digest.hexdigest()]
    return known


def changed(file: str | Path) -> UserError:
    """Return the error for a file that changed while it was read."""
    return UserError(
        f"{file} changed while it was read",
        why="a run needs the same data from start to end",
        fix="restart when the file is complete",
    )


def _write(memory: Path, known: dict[str, Any]) -> None:
    now = time.time_ns()
    settled = {
        name: entry
        for name, entry in known.items()
        if now - max(entry[0][1:3]) > SETTLED_SECONDS * 1e9
    }
    # Without a place for them, the next run recomputes them.
    with suppress(OSError):
        write_atomically(memory, json.dumps(settled))
