"""Error classes with exit codes, and settings as messages spell them: in a shell or in Python."""

import difflib
import errno
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, IntEnum
from functools import partial
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of commands."""

    DONE = 0
    CHECK_FAILED = 1
    BAD_INPUT = 2
    NOTHING_FITS = 3
    NOT_FINITE = 4
    INTERNAL = 70
    PREEMPTED = 75


class MeshwrightError(Exception):
    """The base of all errors that Meshwright reports to users.

    Attributes:
        what: one sentence saying what is wrong.
        why: the reason, with the numbers.
        fix: what to write instead.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__("\n".join(part for part in (what, why, fix) if part))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message in its parts; processes that read data send it to the trainer."""
        return partial(type(self), self.what, why=self.why, fix=self.fix), ()

    def add_note(self, note: str, /) -> None:
        """Add a note, but not JAX's about its hidden frames: the message should come last."""
        if not note.startswith("---"):
            super().add_note(note)


class UserError(MeshwrightError, ValueError):
    """A mistake in the user's input."""

    exit_code = ExitCode.BAD_INPUT


class NotFinite(UserError):
    """A loss, a gradient or a state is not finite, and the run stops."""

    exit_code = ExitCode.NOT_FINITE


class ProcessesDiffer(UserError):
    """Processes that must agree are about to do different things; raised in every process."""


class CheckFailed(MeshwrightError):
    """A check the user asked for (a proof, a strict ledger) failed."""

    exit_code = ExitCode.CHECK_FAILED


class OutOfMemory(MeshwrightError, RuntimeError):
    """A plan needs more memory than its devices have."""

    exit_code = ExitCode.NOTHING_FITS


class EnvironmentProblem(MeshwrightError, RuntimeError):
    """A problem with the environment, not the input: a missing package, a lost process."""

    exit_code = ExitCode.CHECK_FAILED


class LostPeer(EnvironmentProblem):
    """Another process is gone, and this one cannot go on without it."""


class Spelling(Enum):
    """Where the reader of a message would write a setting."""

    COMMAND_LINE = "command line"
    PYTHON = "Python"


_spelling = ContextVar("spelling", default=Spelling.PYTHON)


def current_spelling() -> Spelling:
    """Return how messages spell settings now."""
    return _spelling.get()


@contextmanager
def spelled_for(spelling: Spelling) -> Generator[None]:
    """Spell settings this way in the messages written inside."""
    token = _spelling.set(spelling)
    try:
        yield
    finally:
        _spelling.reset(token)


ANY = "…"
"""Stands for a value that the reader has to choose."""

SettingValue = bool | int | float | str | Sequence[int] | Sequence[str] | None

_ARGUMENTS = {
    "training.global_batch_size": "batch_size",
    # In Python the samples per device follow from the batch.
    "training.micro_batch_size": "batch_size",
    "hydra.run.dir": "run_dir",
    "data.eval_fraction": "eval_data",
    "data.eval_path": "eval_data",
}
"""Arguments in Python whose name is not the last part of their config key."""

_CONFIG_OBJECTS = {
    "sharding": "mw.ShardingConfig",
    "checkpoint": "mw.CheckpointConfig",
    "lora": "mw.LoRA",
    "tracking": "mw.TrackingConfig",
}
"""Sections of the config that are a single argument in Python."""


class Setting:
    """A setting inside a message, spelled as its reader would write it.

    ``f"write {Setting('mesh.pipe', 2)}"`` says ``mesh.pipe=2`` to users of the command line, and
    ``mesh="pipe=2"`` to those of Python.

    Attributes:
        key: the config key.
        values: what to set it to, alternatives after the first; none to only name the setting.
    """

    def __init__(self, key: str, *values: SettingValue) -> None:
        self.key = key
        self.values = values

    def __str__(self) -> str:
        if current_spelling() is Spelling.PYTHON:
            return self._in_python()
        return "=".join(filter(None, (self.key, " or ".join(map(_on_command_line, self.values)))))

    def _in_python(self) -> str:
        section = self.key.partition(".")[0]
        name = _ARGUMENTS.get(self.key, self.key.rpartition(".")[2])
        value = " or ".join(map(_in_python, self.values))
        if self.key == "simulate":
            return f"mw.simulate_devices({value}) before JAX starts"
        if section in _CONFIG_OBJECTS and self.key != "tracking.log_every":
            return f"{section}={_CONFIG_OBJECTS[section]}({name}={value or ANY})"
        if not value:
            return name
        return f'mesh="{name}={value}"' if section == "mesh" else f"{name}={value}"


def argument(name: str, value: Any = None) -> str:
    """Return an argument that is also a flag, as its reader writes it: ``--top-k 5``, ``top_k=5``.

    Without a value, only its name is written.
    """
    if current_spelling() is Spelling.PYTHON:
        return name if value is None else f"{name}={value}"
    flag, several = f"--{name.replace('_', '-')}", isinstance(value, list | tuple)
    text = ",".join(map(str, value)) if several else str(value)
    return flag if value is None else f"{flag} {text}"


def _on_command_line(value: SettingValue) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def _in_python(value: SettingValue) -> str:
    if isinstance(value, str):
        return value if value == ANY else f'"{value}"'
    return str(list(value) if isinstance(value, Sequence) else value)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if the message is empty."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


_NO_INPUT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
_LONGEST_NAME = 120


def explain_input(error: BaseException) -> MeshwrightError | None:
    """Return an error for a file that cannot be used, or for input that is nested without end."""
    if isinstance(error, RecursionError):
        return UserError(
            "the input is nested too deeply",
            why="reading it exceeds the depth that Python allows",
            fix="write it with fewer levels of brackets, lists or mappings",
        )
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.filename is None and error.errno not in _NO_INPUT:
        return None
    given: Any = error.filename
    name = os.fsdecode(given) if isinstance(given, str | bytes | os.PathLike) else "a file"
    shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    kind = EnvironmentProblem if error.errno in _NO_INPUT else UserError
    return kind(
        f"cannot use {shown}",
        why=error.strerror or str(error),
        fix="free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "",
    )


def yaml_line(error: Exception) -> str:
    """Return what is wrong with a YAML text in one line: ``line 2, column 1: expected ','``."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return first_line(error)
    # A text that was read before it was parsed has no file: `<unicode string>`.
    file = "" if mark.name.startswith("<") else f"{mark.name}, "
    return f"{file}line {mark.line + 1}, column {mark.column + 1}: {problem}"


def typed_line(error: BaseException) -> str:
    """Return an exception in one line: ``ValueError: the first line of its message``."""
    kind, line = type(error).__name__, first_line(error)
    return line if line == kind else f"{kind}: {line}"


def missing_package(what: str, package: str, extra: str) -> EnvironmentProblem:
    """Return the error for an optional package that ``what`` needs and that is not installed."""
    return EnvironmentProblem(
        f"{what} needs the package {package}",
        why="it is not installed",
        fix=f"pip install 'meshwright[{extra}]'",
    )


def did_you_mean(word: str, known: Iterable[str], section: str = "") -> str:
    """Return ``did you mean `x`?`` for the nearest known word, or an empty string.

    With a section that the word is a part of, it says ``did you mean `section.x`?``.
    """
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    whole = ".".join(filter(None, (section, *match)))
    return f"did you mean `{whole}`?" if match else ""
