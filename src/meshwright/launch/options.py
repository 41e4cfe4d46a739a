"""Parsing the arguments of ``launch``: ``--nprocs 2 --devices-per-process 2 -- train …``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import UserError, did_you_mean
from meshwright.launch.cluster_options import (
    CLUSTER_FLAGS,
    ClusterKind,
    ClusterOptions,
    read_cluster,
    whole_number,
)

FLAGS = {
    "--nprocs": ("processes to start on this machine, or on each machine of a job", "N"),
    "--devices-per-process": (
        "devices of each: virtual ones on CPUs (default 1), GPUs otherwise",
        "N",
    ),
    "--nodes": ("machines of the run; launch on each of them (default 1)", "N"),
    "--node-rank": ("number of this machine, from 0; SLURM and SkyPilot know it", "N"),
    "--coordinator": ("machine 0 and a free port of it", "HOST:PORT"),
    "--join-timeout": (
        "seconds for all processes to join (default 60, over several machines 300)",
        "SECONDS",
    ),
    "--lost-timeout": (
        "seconds without a sign of life after which a machine counts as lost (default 10)",
        "SECONDS",
    ),
    "--restarts": (
        "how often to restart all processes after a failure (default 0, jobs of clusters 3, with "
        "--min-procs or --min-nodes 10)",
        "N",
    ),
    "--min-procs": (
        "continue with as few as N processes if some do not come back",
        "N",
    ),
    "--min-nodes": ("the same for machines; give it to each launch of the run", "N"),
    "--hang-timeout": (
        "seconds without progress in an update that count as a hang (default 600; 0 for never)",
        "SECONDS",
    ),
    "--grace": (
        "seconds for processes to exit on their own (default 8 after a failure, 60 after Ctrl-C)",
        "SECONDS",
    ),
    **CLUSTER_FLAGS,
}
"""The flags of ``launch``, each with its help text and the placeholder of its value."""

_COMMON = ("--debug", "--help", "-h")
"""Switches that ``launch`` has in common with other commands; the entry point acts on them."""

MAX_PROCESSES = 256
MAX_NODES = 65_536
MAX_RESTARTS = 1000
ELASTIC_RESTARTS = 10
"""Default restarts of a run that may continue with fewer processes."""


@dataclass(frozen=True)
class LaunchOptions:
    """What to launch.

    Attributes:
        program: a Meshwright command, a Python script or ``-m module``, with arguments.
        nprocs: number of processes on this machine.
        devices_per_process: devices of each process; None leaves them to the machine or program.
        grace_seconds: how long processes may take to exit on their own; None for the defaults.
        nodes: number of machines; None if it was not given.
        node_rank: the number of this machine; None if it was not given.
        coordinator: ``host:port`` of process 0; empty if it was not given.
        join_seconds: how long processes wait for each other; None for the default.
        lost_seconds: after how long a silent machine counts as lost; None for the default.
        cluster: how to submit it to a cluster; None to start processes on this machine.
        restarts: how often all processes are restarted after a failure.
        hang_seconds: how long an update may make no progress; None for the default.
        min_procs: the fewest processes to continue with; None if all are needed.
        min_nodes: the fewest machines to continue with; None if all are needed.
    """

    program: tuple[str, ...]
    nprocs: int
    devices_per_process: int | None = None
    grace_seconds: float | None = None
    nodes: int | None = None
    node_rank: int | None = None
    coordinator: str = ""
    join_seconds: float | None = None
    lost_seconds: float | None = None
    cluster: ClusterOptions | None = None
    restarts: int = 0
    hang_seconds: float | None = None
    min_procs: int | None = None
    min_nodes: int | None = None

    @property
    def is_own_command(self) -> bool:
        """Whether the program is a Meshwright command, not a script or a module."""
        return _is_own_command(self.program)

    @property
    def command(self) -> list[str]:
        """The command line of each process."""
        if not self.is_own_command:
            return [sys.executable, *self.program]
        # Without -P, a `yaml.py` in the working directory would be imported instead of the library.
        return [sys.executable, "-P", "-m", "meshwright", *self.program]


def parse_launch(words: Sequence[str]) -> LaunchOptions:
    """Parse the flags before the program, which starts at the first other word."""
    given, program = _split(words)
    cluster = read_cluster(given)
    _check_program(program, is_here=cluster is None or cluster.kind is ClusterKind.SLURM)
    if "--nprocs" not in given and cluster is None:
        raise UserError(
            "the number of processes is missing", fix="write --nprocs N before the program"
        )
    _check_machines(given)
    return LaunchOptions(
        program,
        nprocs=whole_number(given, "--nprocs", 1, MAX_PROCESSES) or 1,
        devices_per_process=whole_number(given, "--devices-per-process", 1, MAX_PROCESSES),
        grace_seconds=_seconds(given, "--grace"),
        nodes=whole_number(given, "--nodes", 1, MAX_NODES),
        node_rank=whole_number(given, "--node-rank", 0, MAX_NODES),
        coordinator=given.get("--coordinator", ""),
        join_seconds=_seconds(given, "--join-timeout", least=1),
        lost_seconds=_seconds(given, "--lost-timeout", least=1),
        cluster=cluster,
        restarts=_restarts(given),
        hang_seconds=_seconds(given, "--hang-timeout"),
        min_procs=_fewest(given, "--min-procs", "--nprocs"),
        min_nodes=_fewest(given, "--min-nodes", "--nodes"),
    )


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the flags before the program ask what ``launch`` does."""
    return bool({"--help", "-h"} & set(_split(words)[0]))


def _split(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the flags with their values, and the program."""
    left = list(words)
    given: dict[str, str] = {}
    while left and left[0] != "--" and (left[0].startswith("--") or left[0] in _COMMON):
        name, equals, value = left.pop(0).partition("=")
        if name in _COMMON and not equals:
            given[name] = ""
            continue
        if name not in FLAGS:
            raise _unknown_flag(name)
        is_switch = not FLAGS[name][1]
        given[name] = value if equals else "" if is_switch or not left else left.pop(0)
    return given, tuple(left[1:] if left[:1] == ["--"] else left)


def _restarts(given: Mapping[str, str]) -> int:
    elastic = next((flag for flag in ("--min-procs", "--min-nodes") if flag in given), None)
    count = whole_number(given, "--restarts", 0, MAX_RESTARTS)
    if elastic is None or count is None:
        return count or (0 if elastic is None else ELASTIC_RESTARTS)
    if count == 0:
        raise UserError(
            f"--restarts 0 contradicts {elastic}",
            why="continuing with fewer processes restarts them",
            fix=f"leave --restarts out for {ELASTIC_RESTARTS}, or write a larger number",
        )
    return count


def _fewest(given: Mapping[str, str], flag: str, of: str) -> int | None:
    """Return the fewest processes or machines to continue with; None if all are needed."""
    if flag not in given:
        return None
    several = given.get("--nodes", "1") != "1"
    if several != (flag == "--min-nodes"):
        other = "--min-nodes" if several else "--min-procs"
        raise UserError(
            f"{flag} is for {'one machine' if several else 'several machines'}",
            why=f"this is a launch with --nodes {given.get('--nodes', '1')}"
            + (": a machine takes part with all its processes" if several else ""),
            fix=f"write {other} instead",
        )
    fewest, most = whole_number(given, flag, 1, MAX_NODES), int(given.get(of, "1"))
    if fewest is not None and fewest > most:
        raise UserError(f"{flag} {fewest} is more than {of} {most}", fix=f"write 1 to {most}")
    return fewest


def _check_machines(given: Mapping[str, str]) -> None:
    """Check the flags for several machines against each other."""
    if "--coordinator" in given:
        # Help texts import this module, and must not wait for the libraries of configs.
        from meshwright.config.launchers import DEFAULT_PORT, split_address

        # Without a port, a job of SLURM takes one that depends on its number.
        default = DEFAULT_PORT if "--slurm" in given else None
        split_address("--coordinator", given["--coordinator"], default_port=default)
    if "--node-rank" not in given:
        return
    rank, nodes = given["--node-rank"], given.get("--nodes")
    if nodes is None:
        raise UserError(
            f"--node-rank {rank} needs the number of machines", fix="add --nodes with their number"
        )
    if rank.isdecimal() and nodes.isdecimal() and int(rank) >= int(nodes):
        raise UserError(
            f"--node-rank {rank} does not exist among --nodes {nodes}",
            why="machines are numbered from 0",
            fix=f"write --node-rank 0 to {int(nodes) - 1}",
        )


def _is_own_command(program: tuple[str, ...]) -> bool:
    return program[0] != "-m" and not program[0].endswith(".py")


def _check_program(program: tuple[str, ...], *, is_here: bool) -> None:
    if not program or program == ("-m",):
        raise UserError(
            "there is nothing to launch",
            fix="write what each process runs: meshwright launch --nprocs 2 -- train …, "
            "or a script: meshwright launch --nprocs 2 train.py …",
        )
    if is_here and program[0].endswith(".py") and not Path(program[0]).is_file():
        raise UserError(f"there is no file `{program[0]}`")
    if program[0] == "launch":
        raise UserError("a launch cannot launch a launch", fix="write --nprocs once")
    if _is_own_command(program) and {"--multirun", "-m"} & set(program):
        raise UserError(
            "a sweep cannot be launched as one run",
            why="the processes of a launch work on one job together",
            fix="leave --multirun out, and launch once for each combination",
        )


def _seconds(given: Mapping[str, str], flag: str, *, least: float = 0) -> float | None:
    if flag not in given:
        return None
    text = given[flag]
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 86_400:
        raise UserError(f"{flag} {text} is not valid", fix=f"write seconds, such as {flag} 30")
    return seconds


def _unknown_flag(name: str) -> UserError:
    hint = did_you_mean(name, FLAGS)
    return UserError(
        f"`meshwright launch` has no flag `{name}`" + (f": {hint}" if hint else ""),
        why=f"its flags: {', '.join([*FLAGS, '--debug', '--help'])}",
        fix="flags of the program go after it: … --nprocs 2 -- doctor --json",
    )
