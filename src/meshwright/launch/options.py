"""Parsing the arguments of ``launch``: ``--nprocs 2 --devices-per-process 2 -- train …``."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from meshwright.errors import UserError, did_you_mean
from meshwright.launch.flags import FLAGS, check_name

_COMMON = ("--debug", "--help", "-h")
"""Switches that ``launch`` has in common with other commands; the entry point acts on them."""

ELASTIC_RESTARTS = 10
"""Default restarts of a run that may continue with fewer processes."""
CLUSTER_RESTARTS = 3
"""Default restarts of a job."""


class ClusterKind(Enum):
    """What a launch writes and submits."""

    SLURM = "slurm"
    JOB_SET = "jobset"
    JOB = "job"


@dataclass(frozen=True)
class LaunchOptions:
    """What to launch, and how a job of a cluster is submitted; `FLAGS` explain the fields.

    The program is a Meshwright command, a Python script or ``-m module``, with arguments. None
    stands for defaults, and for what was not given; without a cluster, processes start on this
    machine.
    """

    program: tuple[str, ...]
    nprocs: int = 1
    devices_per_process: int | None = None
    grace: float | None = None
    nodes: int | None = None
    node_rank: int | None = None
    coordinator: str = ""
    join_timeout: float | None = None
    lost_timeout: float | None = None
    restarts: int = 0
    hang_timeout: float | None = None
    min_procs: int | None = None
    min_nodes: int | None = None
    cluster: ClusterKind | None = None
    dry_run: bool = False
    name: str = "meshwright"
    gpus_per_node: int | None = None
    save_seconds: int = 90
    time: str = ""
    partition: str = ""
    account: str = ""
    sbatch: tuple[str, ...] = ()
    image: str = ""
    claim: str = ""
    namespace: str = ""
    queue: str = ""

    @property
    def is_own_command(self) -> bool:
        """Whether the program is a Meshwright command, not a script or a module."""
        return self.program[0] != "-m" and not self.program[0].endswith(".py")

    @property
    def num_devices(self) -> int | None:
        """The devices of all processes; None if that depends on the machines."""
        nodes, each, gpus = self.nodes or 1, self.devices_per_process, self.gpus_per_node
        if any(re.match("--(nodes|ntasks|gpus|gres)", option) for option in self.sbatch):
            return None
        if each is not None:
            return nodes * self.nprocs * each
        return None if gpus is None else nodes * (gpus // self.nprocs * self.nprocs)

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
    kind = _kind(given)
    _check_flags_fit(given, kind)
    read: dict[str, Any] = {
        flag.removeprefix("--").replace("-", "_"): FLAGS[flag].read(flag, text)
        for flag, text in given.items()
        if flag in FLAGS and flag not in ("--slurm", "--kubernetes")
    }
    options = LaunchOptions(program, cluster=kind, **read)
    if "--name" in given:
        check_name(options.name, slurm=kind is ClusterKind.SLURM)
    _check_program(options)
    if "--nprocs" not in given and kind is None:
        raise UserError(
            "the number of processes is missing", fix="write --nprocs N before the program"
        )
    _check_machines(options, has_coordinator="--coordinator" in given)
    _check_fewest(options)
    return replace(options, restarts=_restarts(options, read.get("restarts")))


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
        is_switch = not FLAGS[name].value
        given[name] = value if equals else "" if is_switch or not left else left.pop(0)
    return given, tuple(left[1:] if left[:1] == ["--"] else left)


def _kind(given: Mapping[str, str]) -> ClusterKind | None:
    if "--slurm" in given and "--kubernetes" in given:
        raise UserError("--slurm and --kubernetes cannot be combined", fix="leave one of them out")
    for flag in ("--slurm", "--dry-run"):
        if given.get(flag):
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
    for flag, known in FLAGS.items():
        if flag in given and known.needs and not set(known.needs) & set(given):
            needed = " or ".join(known.needs)
            one = "one" if " or " in needed else needed
            raise UserError(f"{flag} needs {needed}", fix=f"add {one}, or leave {flag} out")
        if flag in given and known.is_local and kind is not None:
            raise UserError(
                f"{flag} cannot be used with a cluster job",
                why="the cluster starts and ends the processes",
                fix=f"leave {flag} out",
            )
    if "--kubernetes" not in given:
        return
    if "--coordinator" in given:
        raise UserError(
            "--coordinator cannot be used with --kubernetes",
            why="process 0 runs in the first pod, whose name is known",
            fix="leave --coordinator out",
        )
    if not given.get("--image"):
        raise UserError("--kubernetes needs a container image", fix="add --image REGISTRY/NAME:TAG")


def _restarts(options: LaunchOptions, given: int | None) -> int:
    elastic = "--min-procs" if options.min_procs else "--min-nodes" if options.min_nodes else ""
    if elastic and given == 0:
        raise UserError(
            f"--restarts 0 contradicts {elastic}",
            why="continuing with fewer processes restarts them",
            fix=f"leave --restarts out for {ELASTIC_RESTARTS}, or write a larger number",
        )
    if given is not None:
        return given
    return ELASTIC_RESTARTS if elastic else CLUSTER_RESTARTS if options.cluster else 0


def _check_fewest(options: LaunchOptions) -> None:
    """Check the fewest processes or machines to continue with."""
    nodes = options.nodes or 1
    for flag, fewest, of, most in (
        ("--min-procs", options.min_procs, "--nprocs", options.nprocs),
        ("--min-nodes", options.min_nodes, "--nodes", nodes),
    ):
        if fewest is None:
            continue
        if (nodes > 1) != (flag == "--min-nodes"):
            raise UserError(
                f"{flag} is for {'one machine' if nodes > 1 else 'several machines'}",
                why=f"this is a launch with --nodes {nodes}"
                + (": a machine takes part with all its processes" if nodes > 1 else ""),
                fix=f"write {'--min-nodes' if nodes > 1 else '--min-procs'} instead",
            )
        if fewest > most:
            raise UserError(f"{flag} {fewest} is more than {of} {most}", fix=f"write 1 to {most}")


def _check_machines(options: LaunchOptions, *, has_coordinator: bool) -> None:
    """Check the flags for several machines against each other."""
    if has_coordinator:
        # Help texts import this module, and must not wait for the libraries of configs.
        from meshwright.config.launchers import DEFAULT_PORT, split_address

        # Without a port, a job of SLURM takes one that depends on its number.
        default = DEFAULT_PORT if options.cluster is ClusterKind.SLURM else None
        split_address("--coordinator", options.coordinator, default_port=default)
    rank, nodes = options.node_rank, options.nodes
    if rank is None:
        return
    if nodes is None:
        raise UserError(
            f"--node-rank {rank} needs the number of machines", fix="add --nodes with their number"
        )
    if rank >= nodes:
        raise UserError(
            f"--node-rank {rank} does not exist among --nodes {nodes}",
            why="machines are numbered from 0",
            fix=f"write --node-rank 0 to {nodes - 1}",
        )


def _check_program(options: LaunchOptions) -> None:
    program, is_here = options.program, options.cluster in (None, ClusterKind.SLURM)
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
    if options.is_own_command and {"--multirun", "-m"} & set(program):
        raise UserError(
            "a sweep cannot be launched as one run",
            why="the processes of a launch work on one job together",
            fix="leave --multirun out, and launch once for each combination",
        )


def _unknown_flag(name: str) -> UserError:
    hint = did_you_mean(name, FLAGS)
    return UserError(
        f"`meshwright launch` has no flag `{name}`" + (f": {hint}" if hint else ""),
        why=f"its flags: {', '.join([*FLAGS, '--debug', '--help'])}",
        fix="flags of the program go after it: … --nprocs 2 -- doctor --json",
    )
