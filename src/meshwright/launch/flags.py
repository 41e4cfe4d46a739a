"""The flags of ``launch`` in one table: what each sets, how it is read, and where it applies."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError

MAX_PROCESSES = 256
MAX_NODES = 65_536
MAX_RESTARTS = 1000

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SLURM_NAME = re.compile(r"[\w.,:@+-]+")
_SLURM_OPTION = re.compile(r"--?[a-zA-Z][\w-]*(=[^\"'\\\n\r]*)?")
_IMAGE = re.compile(r"[\w.:/@-]+")
TIME_LIMIT = re.compile(r"(?P<days>\d+-)?(?P<parts>\d+(:\d{1,2}){0,2})")
"""Minutes, minutes:seconds or hours:minutes:seconds; with days, hours come first."""

Reader = Callable[[str, str], Any]
"""Takes a flag and the text of its value; returns the value, or raises."""


@dataclass(frozen=True)
class LaunchFlag:
    """A flag of ``launch``, which sets the field of `LaunchOptions` that is called like it.

    A switch has no value. Some flags need one of those that submit a job; others are about
    processes that are started here and now (``is_local``).
    """

    help: str
    value: str = ""
    read: Reader = lambda _, text: text
    needs: tuple[str, ...] = ()
    is_local: bool = False


def _number(help: str, least: int, most: int, value: str = "N", **where: Any) -> LaunchFlag:
    def read(flag: str, text: str) -> int:
        if not text.isdecimal() or not least <= int(text[:9]) <= most:
            raise _not_valid(flag, text, f"{least} to {most}")
        return int(text)

    return LaunchFlag(help, value, read, **where)


def _seconds(help: str, least: float = 0, **where: Any) -> LaunchFlag:
    def read(flag: str, text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not least <= seconds <= 86_400:
            raise _not_valid(flag, text, f"seconds, such as {flag} 30")
        return seconds

    return LaunchFlag(help, "SECONDS", read, **where)


def _matching(pattern: re.Pattern[str], fix: str) -> Reader:
    def read(flag: str, text: str) -> str:
        if not pattern.fullmatch(text):
            raise _not_valid(flag, text, fix)
        return text

    return read


def _label(flag: str, text: str) -> str:
    """Return a value that Kubernetes accepts as a name (RFC 1123)."""
    fix = "up to 63 lower-case letters, digits and dashes, without a dash at either end"
    _matching(_LABEL, fix)(flag, text)
    if len(text) > 63:
        raise UserError(
            f"{flag} {text} is not valid", why=f"it has {len(text)} characters", fix=f"write {fix}"
        )
    return text


def check_name(name: str, *, slurm: bool) -> None:
    """Refuse a name that a job of SLURM, or an object of Kubernetes, cannot have."""
    if slurm:
        _matching(_SLURM_NAME, "a name without spaces or quotes")("--name", name)
        return
    _label("--name", name)
    # It is also the name of a service, which starts with a letter.
    _matching(re.compile("[a-z].*"), "a name that starts with a letter")("--name", name)


def _sbatch(flag: str, text: str) -> tuple[str, ...]:
    """Return the options of sbatch, each as one word that needs no quotes in the script."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{flag} cannot be read: {error}", fix="close the quote") from error
    for word in words:
        if not _SLURM_OPTION.fullmatch(word):
            raise UserError(
                f"{flag}: `{word}` is not valid",
                why="each word is one option of sbatch with its value",
                fix=f"write {flag} '--option=value --other=value', without quotes in the values",
            )
    return tuple(words)


def _not_valid(flag: str, text: str, fix: str) -> UserError:
    return UserError(f"{flag} {text}".strip() + " is not valid", fix=f"write {fix}")


_SLURM = ("--slurm",)
_KUBERNETES = ("--kubernetes",)
_CLUSTER = ("--slurm", "--kubernetes")

FLAGS = {
    "--nprocs": _number(
        "processes to start on this machine, or on each machine of a job", 1, MAX_PROCESSES
    ),
    "--devices-per-process": _number(
        "devices of each: virtual ones on CPUs (default 1), GPUs otherwise", 1, MAX_PROCESSES
    ),
    "--nodes": _number("machines of the run; launch on each of them (default 1)", 1, MAX_NODES),
    "--node-rank": _number(
        "number of this machine, from 0; SLURM and SkyPilot know it", 0, MAX_NODES, is_local=True
    ),
    "--coordinator": LaunchFlag("machine 0 and a free port of it", "HOST:PORT"),
    "--join-timeout": _seconds(
        "seconds for all processes to join (default 60, over several machines 300)", 1
    ),
    "--lost-timeout": _seconds(
        "seconds without a sign of life after which a machine counts as lost (default 10)",
        1,
        is_local=True,
    ),
    "--restarts": _number(
        "how often to restart all processes after a failure (default 0, jobs of clusters 3, with "
        "--min-procs or --min-nodes 10)",
        0,
        MAX_RESTARTS,
    ),
    "--min-procs": _number(
        "continue with as few as N processes if some do not come back", 1, MAX_NODES, is_local=True
    ),
    "--min-nodes": _number(
        "the same for machines; give it to each launch of the run", 1, MAX_NODES, is_local=True
    ),
    "--hang-timeout": _seconds(
        "seconds without progress in a step that count as a hang (default 600; 0 for never)"
    ),
    "--grace": _seconds(
        "seconds for processes to exit on their own (default 8 after a failure, 60 after Ctrl-C)",
        is_local=True,
    ),
    "--slurm": LaunchFlag("submit a SLURM job instead of starting processes here"),
    "--kubernetes": LaunchFlag("apply a JobSet to Kubernetes; --kubernetes=job a plain Job"),
    "--dry-run": LaunchFlag(
        "print the sbatch script or the manifest, and submit nothing",
        read=lambda _, text: True,
        needs=_CLUSTER,
    ),
    "--name": LaunchFlag("name of the job (default meshwright)", "NAME", needs=_CLUSTER),
    "--gpus-per-node": _number("GPUs of each machine, or of each pod", 1, 1024, needs=_CLUSTER),
    "--save-seconds": _number(
        "seconds to save before the job is ended (default 90)", 1, 65535, "SECONDS", needs=_CLUSTER
    ),
    "--time": LaunchFlag(
        "time limit of the SLURM job, such as 4:00:00",
        "LIMIT",
        _matching(TIME_LIMIT, "--time 4:00:00 for four hours"),
        _SLURM,
    ),
    "--partition": LaunchFlag(
        "partition of the SLURM job",
        "NAME",
        _matching(_SLURM_NAME, "a name that `sinfo` shows"),
        _SLURM,
    ),
    "--account": LaunchFlag(
        "account that the SLURM job is charged to",
        "NAME",
        _matching(_SLURM_NAME, "a name without spaces or quotes"),
        _SLURM,
    ),
    "--sbatch": LaunchFlag(
        "further options of sbatch, such as '--mem=0 --exclusive'", "OPTIONS", _sbatch, _SLURM
    ),
    "--image": LaunchFlag(
        "container image of the pods, with Python and Meshwright",
        "IMAGE",
        _matching(_IMAGE, "REGISTRY/NAME:TAG"),
        _KUBERNETES,
    ),
    "--claim": LaunchFlag(
        "volume claim for the run folder, mounted at /checkpoints", "NAME", _label, _KUBERNETES
    ),
    "--namespace": LaunchFlag("namespace of the Kubernetes objects", "NAME", _label, _KUBERNETES),
    "--queue": LaunchFlag("local queue of Kueue", "NAME", _label, _KUBERNETES),
}
"""The flags of ``launch`` by name, in the order of its help."""
