"""What is read from compiled programs, kept beside the compilation cache.

A program that comes from the cache has been through no compiler, and on accelerators it comes
without its text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from meshwright.compiled.disk_cache import default_folder, disk_cache, drop_oldest, warn_unwritable
from meshwright.compiled.memory import MemoryUse
from meshwright.runtime.jax_internals import compiler_options_of
from meshwright.runtime.versions import package_versions

MAX_BYTES = 2**30
"""Kept texts, compressed; the oldest are deleted above."""

_FORMAT = 1
_ENDING = ".json.gz"
_NAMED = re.compile(r'^#(loc\d*) = loc\("((?:[^"\\]|\\.)*)"[()]', re.MULTILINE)
_REFERENCE = re.compile(r"loc\(#(loc\d*)\)")
_INNER = re.compile(r"\(#loc\d*\)")
_DEFINITION = re.compile(r"^#loc.*\n?", re.MULTILINE)


@dataclass(frozen=True)
class ProgramFacts:
    """What is read from a compiled program; None for what nobody has asked the compiler for.

    Attributes:
        partitioned: the text after the partitioner; empty if the compiler does not write it.
        optimized: the text of what the backend runs; empty if the backend has none.
        memory: memory per device; None also if the backend does not report it.
    """

    partitioned: str | None
    optimized: str | None
    memory: MemoryUse | None

    def completed(self, kept: ProgramFacts | None) -> ProgramFacts:
        """Return these facts, and where they are missing the kept ones."""
        if kept is None:
            return self
        return ProgramFacts(
            _better(self.partitioned, kept.partitioned),
            _better(self.optimized, kept.optimized),
            self.memory or kept.memory,
        )


def key_of(lowered: Any, compiler_options: Mapping[str, Any]) -> str:
    """Return a hash of a lowered program and of all that its compilation depends on.

    Names of modules are part of it, lines of source files are not.
    """
    devices = jax.devices()
    depends_on = {
        "program": _without_lines(lowered.as_text(debug_info=True)),
        "options": sorted(map(repr, {**compiler_options, **compiler_options_of(lowered)}.items())),
        "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "versions": [package_versions(), devices[0].client.platform_version],
        "devices": [[d.device_kind, d.process_index, getattr(d, "coords", None)] for d in devices],
        "format": _FORMAT,
    }
    return hashlib.sha256(json.dumps(depends_on, default=repr).encode()).hexdigest()


def load_facts(key: str) -> ProgramFacts | None:
    """Return what was kept under a key; None if nothing was, or it cannot be read."""
    try:
        values = json.loads(gzip.decompress((_folder() / f"{key}{_ENDING}").read_bytes()))
        memory = values["memory"]
        return ProgramFacts(
            values["partitioned"],
            values["optimized"],
            None if memory is None else MemoryUse(**memory),
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        return None


def keep_facts(key: str, facts: ProgramFacts) -> None:
    """Keep facts under a key; several processes may do so at once."""
    folder = _folder()
    content = gzip.compress(json.dumps(asdict(facts)).encode(), compresslevel=4)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".new-{uuid.uuid4().hex}"
        new.write_bytes(content)
        new.replace(folder / f"{key}{_ENDING}")
    except OSError as error:
        warn_unwritable(str(folder), error.strerror or str(error))
        return
    drop_oldest(folder, MAX_BYTES)


def _better(new: str | None, kept: str | None) -> str | None:
    """Return a text if there is one, and otherwise what is known about its absence."""
    return new or (kept if new is None or kept else new)


def _folder() -> Path:
    """Return the folder of texts: inside of JAX's, if that is on this machine."""
    folder = disk_cache() or ""
    return (default_folder() if "://" in folder else Path(folder)) / "texts"


def _without_lines(text: str) -> str:
    """Return a program with the names of its operations, and without the lines they are from."""
    names = dict(_NAMED.findall(text))
    named = _REFERENCE.sub(lambda match: f"loc({names.get(match[1], '')})", text)
    return _INNER.sub("", _DEFINITION.sub("", named))
