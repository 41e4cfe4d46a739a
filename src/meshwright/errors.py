"""Meshwright's errors: what is wrong, why (with the numbers), and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of commands."""

    DONE = 0
    CHECK_FAILED = 1
    BAD_INPUT = 2
    NOTHING_FITS = 3
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


class UserError(MeshwrightError, ValueError):
    """A mistake in the user's input."""

    exit_code = ExitCode.BAD_INPUT


class CheckFailed(MeshwrightError):
    """A check the user asked for (a proof, a strict ledger) failed."""

    exit_code = ExitCode.CHECK_FAILED


class EnvironmentProblem(MeshwrightError, RuntimeError):
    """A problem of the environment, not the input: a missing package, a lost process."""

    exit_code = ExitCode.CHECK_FAILED


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name if it has no message."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean `x`?`` for the nearest known word, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean `{match[0]}`?" if match else ""
