"""The flags of ``launch`` for clusters: ``--slurm``, ``--kubernetes``, and what goes with them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from meshwright.errors import UserError
from meshwright.text.units import counted

SLURM_ONLY = {
    "--time": ("time limit of the SLURM job, such as 4:00:00", "LIMIT"),
    "--partition": ("partition of the SLURM job", "NAME"),
    "--account": ("account that the SLURM job is charged to", "NAME"),
    "--sbatch": ("further options of sbatch, such as '--mem=0 --exclusive'", "OPTIONS"),
}
KUBERNETES_ONLY = {
    "--image": ("container image of the pods, with Python and Meshwright", "IMAGE"),
    "--claim": ("volume claim for the run folder, mounted at /checkpoints", "NAME"),
    "--namespace": ("namespace of the Kubernetes objects", "NAME"),
    "--queue": ("local queue of Kueue", "NAME"),
}
_BOTH = {
    "--dry-run": ("print the sbatch script or the manifest, and submit nothing", ""),
    "--name": ("name of the job (default meshwright)", "NAME"),
    "--gpus-per-node": ("GPUs of each machine, or of each pod", "N"),
    "--save-seconds": ("seconds to save before the job is ended (default 90)", "SECONDS"),
}
CLUSTER_FLAGS = {
    "--slurm": ("submit a SLURM job instead of starting processes here", ""),
    "--kubernetes": ("apply a JobSet to Kubernetes; --kubernetes=job a plain Job", ""),
    **_BOTH,
    **SLURM_ONLY,
    **KUBERNETES_ONLY,
}
"""Each flag with its help text and the placeholder of its value; empty for switches."""

_ON_THE_MACHINE = ("--node-rank", "--grace", "--min-procs", "--min-nodes", "--lost-timeout")
"""Flags about processes that are started here and now."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SLURM_NAME = re.compile(r"[\w.,:@+-]+")
_SLURM_OPTION = re.compile(r"--?[a-zA-Z][\w-]*(=[^\"'\\\n\r]*)?")
_IMAGE = re.compile(r"[\w.:/@-]+")
_TIME = re.compile(r"(?P<days>\d+-)?(?P<parts>\d+(:\d{1,2}){0,2})")
"""Minutes, minutes:seconds or hours:minutes:seconds; with days, hours come first."""
_SIGNAL_LEAD = 60
"""How many seconds before the end SLURM sends a signal for which no time is given."""


class ClusterKind(Enum):
    """What a launch writes and submits."""

    SLURM = "slurm"
    JOB_SET = "jobset"
    JOB = "job"


@dataclass(frozen=True)
class ClusterOptions:
    """How a launch is submitted to a cluster.

    Attributes:
        kind: what is written and submitted.
        dry_run: whether to print it only.
        name: the name of the job.
        gpus_per_node: GPUs of each machine or pod; None leaves them out.
        max_restarts: how often a failed job is restarted; preemptions do not count.
        save_seconds: how long before its end a job is asked to save.
        time: SLURM's time limit.
        partition: SLURM's partition.
        account: SLURM's account.
        sbatch: further options of sbatch.
        image: the container image.
        claim: the volume claim for the run folder.
        namespace: the namespace of the Kubernetes objects.
        queue: Kueue's local queue.
    """

    kind: ClusterKind
    dry_run: bool = False
    name: str = "meshwright"
    gpus_per_node: int | None = None
    max_restarts: int = 3
    save_seconds: int = 90
    time: str = ""
    partition: str = ""
    account: str = ""
    sbatch: tuple[str, ...] = ()
    image: str = ""
    claim: str = ""
    namespace: str = ""
    queue: str = ""


def read_cluster(given: Mapping[str, str]) -> ClusterOptions | None:
    """Return how a launch is submitted, by its flags; None if it starts processes here."""
    kind = _kind(given)
    _check_flags_fit(given, kind)
    if kind is None:
        return None
    if kind is not ClusterKind.SLURM and not given.get("--image"):
        raise UserError("--kubernetes needs a container image", fix="add --image REGISTRY/NAME:TAG")
    restarts = whole_number(given, "--restarts", 0, 1000)
    options = ClusterOptions(
        kind,
        dry_run="--dry-run" in given,
        name=_name(given, kind),
        gpus_per_node=whole_number(given, "--gpus-per-node", 1, 1024),
        max_restarts=3 if restarts is None else restarts,
        save_seconds=whole_number(given, "--save-seconds", 1, 65535) or 90,
        time=_matching(given, "--time", _TIME, "--time 4:00:00 for four hours"),
        partition=_matching(given, "--partition", _SLURM_NAME, "a name that `sinfo` shows"),
        account=_matching(given, "--account", _SLURM_NAME, "a name without spaces or quotes"),
        sbatch=_sbatch(given.get("--sbatch", "")),
        image=_matching(given, "--image", _IMAGE, "REGISTRY/NAME:TAG"),
        claim=_label(given, "--claim"),
        namespace=_label(given, "--namespace"),
        queue=_label(given, "--queue"),
    )
    _check_time_to_save(options.time, options.save_seconds, options.sbatch)
    return options


def _kind(given: Mapping[str, str]) -> ClusterKind | None:
    if "--slurm" in given and "--kubernetes" in given:
        raise UserError("--slurm and --kubernetes cannot be combined", fix="leave one of them out")
    if given.get("--slurm") or given.get("--dry-run"):
        flag = "--slurm" if given.get("--slurm") else "--dry-run"
        raise UserError(f"{flag} takes no value", fix=f"write {flag}")
    if "--slurm" in given:
        return ClusterKind.SLURM
    if "--kubernetes" not in given:
        return None
    try:
        return ClusterKind(given["--kubernetes"] or "jobset")
    except ValueError:
        raise UserError(
            f"--kubernetes={given['--kubernetes']} is not valid",
            fix="write --kubernetes for a JobSet, or --kubernetes=job for a plain Job",
        ) from None


def _check_flags_fit(given: Mapping[str, str], kind: ClusterKind | None) -> None:
    """Raise if a flag belongs to another place than the one that was chosen."""
    for flag in given:
        if flag in SLURM_ONLY and kind is not ClusterKind.SLURM:
            raise UserError(f"{flag} needs --slurm", fix=f"add --slurm, or leave {flag} out")
        if flag in KUBERNETES_ONLY and kind in (None, ClusterKind.SLURM):
            raise UserError(
                f"{flag} needs --kubernetes", fix=f"add --kubernetes, or leave {flag} out"
            )
        if flag in _BOTH and kind is None:
            raise UserError(
                f"{flag} needs --slurm or --kubernetes", fix=f"add one, or leave {flag} out"
            )
        if flag in _ON_THE_MACHINE and kind is not None:
            raise UserError(
                f"{flag} cannot be used with a cluster job",
                why="the cluster starts and ends the processes",
                fix=f"leave {flag} out",
            )
    if kind in (ClusterKind.JOB, ClusterKind.JOB_SET) and "--coordinator" in given:
        raise UserError(
            "--coordinator cannot be used with --kubernetes",
            why="process 0 runs in the first pod, whose name is known",
            fix="leave --coordinator out",
        )


def _name(given: Mapping[str, str], kind: ClusterKind) -> str:
    if "--name" not in given:
        return "meshwright"
    if kind is ClusterKind.SLURM:
        return _matching(given, "--name", _SLURM_NAME, "a name without spaces or quotes")
    name = _label(given, "--name")
    # It is also the name of a service, which starts with a letter.
    _matching(given, "--name", re.compile("[a-z].*"), "a name that starts with a letter")
    return name


def _label(given: Mapping[str, str], flag: str) -> str:
    """Return the value of a flag that Kubernetes accepts as a name (RFC 1123)."""
    fix = "up to 63 lower-case letters, digits and dashes, without a dash at either end"
    text = _matching(given, flag, _LABEL, fix)
    if len(text) > 63:
        raise UserError(
            f"{flag} {text} is not valid", why=f"it has {len(text)} characters", fix=f"write {fix}"
        )
    return text


def _matching(given: Mapping[str, str], flag: str, pattern: re.Pattern[str], fix: str) -> str:
    text = given.get(flag, "")
    if flag in given and not pattern.fullmatch(text):
        raise UserError(f"{flag} {text}".strip() + " is not valid", fix=f"write {fix}")
    return text


def whole_number(given: Mapping[str, str], flag: str, least: int, most: int) -> int | None:
    """Return the value of a flag that takes a whole number; None if it was not given."""
    text = given.get(flag, "")
    if flag not in given:
        return None
    if not text.isdecimal() or not least <= int(text[:9]) <= most:
        raise UserError(f"{flag} {text}".strip() + " is not valid", fix=f"write {least} to {most}")
    return int(text)


def _sbatch(text: str) -> tuple[str, ...]:
    """Return the options of sbatch, each as one word that needs no quotes in the script."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--sbatch cannot be read: {error}", fix="close the quote") from error
    for word in words:
        if not _SLURM_OPTION.fullmatch(word):
            raise UserError(
                f"--sbatch: `{word}` is not valid",
                why="each word is one option of sbatch with its value",
                fix="write --sbatch '--option=value --other=value', without quotes in the values",
            )
    return tuple(words)


def limit_seconds(text: str) -> int | None:
    """Return a time limit as SLURM reads it, in whole minutes; None if there is none."""
    written = _TIME.fullmatch(text)
    if written is None:
        return None
    parts = [int(part) for part in written["parts"].split(":")]
    if written["days"]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        hours += 24 * int(written["days"][:-1])
    else:
        first = [0] if len(parts) < 3 else []
        hours, minutes, seconds = [*first, *parts, 0][:3]
    # SLURM rounds up to minutes, and takes zero for no limit.
    return -(-(3600 * hours + 60 * minutes + seconds) // 60) * 60 or None


def _check_time_to_save(time: str, save_seconds: int, sbatch: Sequence[str]) -> None:
    """Raise if a job would be asked to save before it starts.

    Args:
        time: the time limit; empty for that of the partition.
        save_seconds: how long before its end the job is asked to save.
        sbatch: further options of sbatch, which may replace both.
    """
    lead = save_seconds
    for option in sbatch:
        name, _, value = option.partition("=")
        if name == "--time":
            time = value
        elif name == "--signal":
            _, at, seconds = value.partition("@")
            lead = int(seconds) if at and seconds.isdecimal() else _SIGNAL_LEAD
    limit = limit_seconds(time)
    if limit is None or limit > lead:
        return
    raise UserError(
        f"--time {time} is too short for a job that has to save {lead} seconds before its end",
        why=f"it is {counted(limit, 'second')}, so the job would have to save as soon as it starts",
        fix=f"write a longer --time, or --save-seconds {max(limit // 3, 1)}",
    )
