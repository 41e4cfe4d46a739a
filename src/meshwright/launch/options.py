"""Parsing the arguments of ``launch``: ``--nprocs 2 --devices-per-process 2 -- train …``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import UserError, did_you_mean

FLAGS = {
    "--nprocs": ("processes to start on this machine", "N"),
    "--devices-per-process": (
        "devices of each: virtual ones on CPUs (default 1), GPUs otherwise",
        "N",
    ),
    "--grace": (
        "seconds for processes to exit on their own (default 8 after a failure, 60 after Ctrl-C)",
        "SECONDS",
    ),
}
"""The flags of ``launch``, each with its help text and the placeholder of its value."""

MAX_PROCESSES = 256


@dataclass(frozen=True)
class LaunchOptions:
    """What to launch.

    Attributes:
        program: a Meshwright command, a Python script or ``-m module``, with arguments.
        nprocs: number of processes.
        devices_per_process: devices of each process; None leaves them to the machine or program.
        grace_seconds: how long processes may take to exit on their own; None for the defaults.
    """

    program: tuple[str, ...]
    nprocs: int
    devices_per_process: int | None = None
    grace_seconds: float | None = None

    @property
    def command(self) -> list[str]:
        """The command line of each process."""
        first = self.program[0]
        if first == "-m" or first.endswith(".py"):
            return [sys.executable, *self.program]
        return [sys.executable, "-m", "meshwright", *self.program]


def parse_launch(words: Sequence[str]) -> LaunchOptions:
    """Parse the flags before the program, which starts at the first other word."""
    left = list(words)
    given: dict[str, str] = {}
    while left and left[0].startswith("--") and left[0] != "--":
        name, equals, value = left.pop(0).partition("=")
        if name not in FLAGS:
            raise _unknown_flag(name)
        given[name] = value if equals else left.pop(0) if left else ""
    program = tuple(left[1:] if left[:1] == ["--"] else left)
    _check_program(program)
    if "--nprocs" not in given:
        raise UserError(
            "the number of processes is missing", fix="write --nprocs N before the program"
        )
    grace = given.get("--grace")
    return LaunchOptions(
        program,
        nprocs=_count("--nprocs", given["--nprocs"]),
        devices_per_process=_count("--devices-per-process", given["--devices-per-process"])
        if "--devices-per-process" in given
        else None,
        grace_seconds=None if grace is None else _seconds(grace),
    )


def _check_program(program: tuple[str, ...]) -> None:
    if not program or program == ("-m",):
        raise UserError(
            "there is nothing to launch",
            fix="write what each process runs: meshwright launch --nprocs 2 -- train …, "
            "or a script: meshwright launch --nprocs 2 train.py …",
        )
    if program[0].endswith(".py") and not Path(program[0]).is_file():
        raise UserError(f"there is no file `{program[0]}`")
    if program[0] == "launch":
        raise UserError("a launch cannot launch a launch", fix="write --nprocs once")
    own = program[0] != "-m" and not program[0].endswith(".py")
    if own and {"--multirun", "-m"} & set(program):
        raise UserError(
            "a sweep cannot be launched as one run",
            why="the processes of a launch work on one job together",
            fix="leave --multirun out, and launch once for each combination",
        )


def _count(flag: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PROCESSES:
        raise UserError(f"{flag} {text} is not valid", fix=f"write 1 to {MAX_PROCESSES}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise UserError(f"--grace {text} is not valid", fix="write seconds, such as --grace 30")
    return seconds


def _unknown_flag(name: str) -> UserError:
    hint = did_you_mean(name, FLAGS)
    return UserError(
        f"`meshwright launch` has no flag `{name}`" + (f": {hint}" if hint else ""),
        why=f"its flags: {', '.join(FLAGS)}",
        fix="flags of the program go after it: … --nprocs 2 -- doctor --json",
    )
