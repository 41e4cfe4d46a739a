"""The compilation cache on disk: when JAX uses it, where it is, and what is kept beside it."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import re
import uuid
import warnings
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshwright.compiled.memory import MemoryUse
from meshwright.processes import process_count
from meshwright.runtime.host_machine import user_cache
from meshwright.runtime.jax_internals import compiler_options_of
from meshwright.runtime.versions import package_versions

MAX_BYTES = 10 * 2**30
"""How large the cache in the user's cache folder grows before its oldest entries are deleted."""

_FOLDER = "jax_compilation_cache_dir"
_ENABLED = "jax_enable_compilation_cache"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"


def use_disk_cache(wanted: bool | str | os.PathLike[str] | None) -> None:
    """Turn the compilation cache on or off, for this whole process.

    JAX's own settings (JAX_COMPILATION_CACHE_DIR and others) are kept, unless ``wanted``
    contradicts them: it is a folder; true for JAX's own setting, or else the user's cache folder;
    false for no cache; None for true on accelerators in a single process, and JAX's settings
    elsewhere. A folder that cannot be written to is a warning, and nothing is cached.

    CPUs compile quickly, and machine code for one may not run on another. Of several processes only
    the first writes entries, and on GPUs a process that compiles waits for the others to compile
    too, which a process that finds an entry does not.
    """
    if wanted is False:
        _set(_ENABLED, False)
        return
    if wanted is None and not _by_default():
        return
    folder = _absolute(wanted) if wanted not in (None, True) else jax.config.values[_FOLDER]
    own = not folder
    folder = str(default_folder()) if own else folder
    if not _prepare(folder):
        return
    if own:
        drop_oldest(Path(folder), MAX_BYTES)
    if not os.environ.get(_MIN_SECONDS.upper()):
        # A run has dozens of small programs, which together take seconds to compile.
        jax.config.update(_MIN_SECONDS, 0.0)
    _set(_FOLDER, folder)
    _set(_ENABLED, True)


def disk_cache() -> str | None:
    """Return the folder of the compilation cache; None if there is no cache."""
    values = jax.config.values
    return values[_FOLDER] or None if values[_ENABLED] else None


@contextmanager
def no_disk_cache() -> Generator[None]:
    """Inside, compile whatever the cache holds, and write nothing to it."""
    if disk_cache() is None:
        yield
        return
    _set(_ENABLED, False)
    try:
        yield
    finally:
        _set(_ENABLED, True)


def default_folder() -> Path:
    """Return where programs are cached unless the user names another folder."""
    return user_cache("programs")


def drop_oldest(folder: Path, most: int) -> None:
    """Delete the files used longest ago if a folder holds more than ``most`` bytes."""
    files: list[tuple[float, int, Path]] = []
    for path in folder.rglob("*"):
        try:
            stat = path.stat()
        except OSError:
            # Another process has deleted it.
            continue
        if path.is_file():
            files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    excess = sum(size for _, size, _ in files) - most
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return
        excess -= size


@functools.cache
def warn_unwritable(folder: str, why: str) -> None:
    """Warn, once per folder, that nothing can be cached in it."""
    warnings.warn(
        f"compiled programs cannot be kept in {folder} ({why}), and the next run compiles them "
        "again. Name another folder with compilation_cache, or write false to do without",
        UserWarning,
        stacklevel=2,
    )


def _by_default() -> bool:
    """Whether to use the cache without being asked to."""
    values = jax.config.values
    if values[_FOLDER] or not values[_ENABLED]:
        return False
    return process_count() == 1 and jax.default_backend() != "cpu"


def _absolute(folder: str | os.PathLike[str]) -> str:
    """Return a folder as it is named from any working directory; addresses stay as they are."""
    text = os.fspath(folder)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _prepare(folder: str) -> bool:
    """Create a local folder; return whether it can be written to."""
    if "://" in folder:
        return True
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn_unwritable(folder, error.strerror or str(error))
        return False
    if not os.access(folder, os.W_OK | os.X_OK):
        warn_unwritable(folder, "permission denied")
        return False
    return True


def _set(name: str, value: object) -> None:
    if jax.config.values[name] == value:
        return
    jax.config.update(name, value)
    # JAX decides once per process whether the cache is used; a reset makes it decide again.
    compilation_cache.reset_cache()


MAX_TEXT_BYTES = 2**30
"""How large the texts beside it grow, compressed."""

_FORMAT = 1
_ENDING = ".json.gz"
_NAMED = re.compile(r'^#(loc\d*) = loc\("((?:[^"\\]|\\.)*)"[()]', re.MULTILINE)
_REFERENCE = re.compile(r"loc\(#(loc\d*)\)")
_INNER = re.compile(r"\(#loc\d*\)")
_DEFINITION = re.compile(r"^#loc.*\n?", re.MULTILINE)


@dataclass(frozen=True)
class ProgramFacts:
    """What is read from a compiled program; None for what the compiler was not asked for.

    Texts are empty if the compiler does not write them; the memory is None also if the backend does
    not report it.
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
    text = lowered.as_text(debug_info=True)
    names = dict(_NAMED.findall(text))
    named = _REFERENCE.sub(lambda match: f"loc({names.get(match[1], '')})", text)
    depends_on = {
        "program": _INNER.sub("", _DEFINITION.sub("", named)),
        "options": sorted(map(repr, {**compiler_options, **compiler_options_of(lowered)}.items())),
    }
    return digest_here(depends_on)


def digest_here(values: Mapping[str, Any]) -> str:
    """Return a hash of values, and of the flags, versions and devices of this process."""
    devices = jax.devices()
    surroundings = {
        "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "versions": [package_versions(), devices[0].client.platform_version],
        "devices": [[d.device_kind, d.process_index, getattr(d, "coords", None)] for d in devices],
        "format": _FORMAT,
    }
    whole = json.dumps({**values, **surroundings}, default=repr)
    return hashlib.sha256(whole.encode()).hexdigest()


def load_facts(key: str) -> ProgramFacts | None:
    """Return what was kept under a key; None if nothing was, or it cannot be read."""
    content = load_content(f"{key}{_ENDING}")
    try:
        values: dict[str, Any] = json.loads(content or b"")
        values["memory"] = values["memory"] and MemoryUse(**values["memory"])
        return ProgramFacts(**values)
    except (ValueError, KeyError, TypeError):
        return None


def keep_facts(key: str, facts: ProgramFacts) -> None:
    """Keep facts under a key; several processes may do so at once."""
    keep_content(f"{key}{_ENDING}", json.dumps(asdict(facts)).encode())


def load_content(name: str) -> bytes | None:
    """Return what was kept beside the cache under a name; None if it is not there or damaged."""
    try:
        return gzip.decompress((_folder() / name).read_bytes())
    except (OSError, EOFError, zlib.error):
        return None


def keep_content(name: str, content: bytes) -> None:
    """Keep a file beside the cache, compressed; several processes may do so at once."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".new-{uuid.uuid4().hex}"
        new.write_bytes(gzip.compress(content, compresslevel=4))
        new.replace(folder / name)
    except OSError as error:
        warn_unwritable(str(folder), error.strerror or str(error))
        return
    drop_oldest(folder, MAX_TEXT_BYTES)


def _better(new: str | None, kept: str | None) -> str | None:
    """Return a text if there is one, and otherwise what is known about its absence."""
    return new or (kept if new is None or kept else new)


def _folder() -> Path:
    """Return the folder of texts: inside of JAX's, if that is on this machine."""
    folder = disk_cache() or ""
    return (default_folder() if "://" in folder else Path(folder)) / "texts"
