"""The run that a launch belongs to, by its flags and the environment."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.config.environment import read_environment
from meshwright.config.launchers import (
    DEFAULT_PORT,
    ENVIRONMENT,
    LAUNCHERS,
    Found,
    detect,
    read_launcher,
    split_address,
)
from meshwright.errors import UserError
from meshwright.launch.options import LaunchOptions
from meshwright.text.units import counted

_NEEDED = ("MASTER_ADDR", "RANK", "WORLD_SIZE")
_PORT = "MASTER_PORT"
_STARTED = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables of processes that another launcher has started already."""


@dataclass(frozen=True)
class WholeRun:
    """The run that a launch belongs to; shared if the environment describes it to all machines."""

    address: str
    port: int
    first_rank: int
    world_size: int
    is_shared: bool


def find_run(launch: LaunchOptions, environ: Mapping[str, str]) -> WholeRun:
    """Return the run of a launch.

    With --nodes, the launch starts the processes of one machine among these. With MASTER_ADDR,
    RANK and WORLD_SIZE, it starts the processes from RANK on of a run of WORLD_SIZE processes.
    Otherwise it starts a run of its own.
    """
    if launch.nodes is not None and launch.nodes > 1:
        return _one_of_several(launch, launch.nodes, environ)
    nprocs = launch.nprocs
    if launch.coordinator:
        host, port = split_address("--coordinator", launch.coordinator)
        return WholeRun(host, port, 0, nprocs, is_shared=False)
    given = [name for name in _NEEDED if environ.get(name, "").strip()]
    started = any(environ.get(name, "").strip() for name in _STARTED)
    if len(given) < len(_NEEDED) or started or environ["WORLD_SIZE"].strip() == "1":
        return WholeRun("127.0.0.1", free_port(), 0, nprocs, is_shared=False)
    settings = read_environment({name: environ.get(name, "") for name in (*_NEEDED, _PORT)})
    rank, world_size = settings["rank"], settings["world_size"]
    if rank % nprocs or world_size % nprocs or not 0 <= rank < world_size:
        raise _misfit(nprocs, rank, world_size)
    port = settings.get("master_port", DEFAULT_PORT)
    return WholeRun(settings["master_addr"], port, rank, world_size, is_shared=True)


def _one_of_several(launch: LaunchOptions, nodes: int, environ: Mapping[str, str]) -> WholeRun:
    """Return the run of a launch on one of several machines, by its flags and the environment."""
    found = [one for one in detect(environ) if one.numbers.get("world_size", 1) > 1]
    ranks = {_node_rank(launch, nodes, one, environ): one for one in found if one.is_complete}
    rank = launch.node_rank if launch.node_rank is not None else next(iter(ranks), None)
    if rank is None:
        raise UserError(
            f"--nodes {nodes} needs the number of this machine",
            why="the environment does not say which of the machines this is",
            fix=f"add --node-rank: 0 on the first machine, up to {nodes - 1} on the last",
        )
    for other, one in ranks.items():
        if other != rank:
            given = one.shown(environ, "node_rank", "rank", "world_size")
            raise _contradiction(launch, one.launcher.title, given)
    host, port = _coordinator(launch, nodes, environ)
    return WholeRun(host, port, rank * launch.nprocs, nodes * launch.nprocs, is_shared=True)


def _node_rank(launch: LaunchOptions, nodes: int, found: Found, environ: Mapping[str, str]) -> int:
    """Return the number of this machine, by a launcher that started one launch on each."""
    size, rank = found.numbers["world_size"], found.numbers["rank"]
    if size == nodes:
        return found.numbers.get("node_rank", rank)
    # WORLD_SIZE may count processes, and RANK the first one of this machine.
    counts_processes = found.launcher is ENVIRONMENT and size == nodes * launch.nprocs
    if counts_processes and rank % launch.nprocs == 0:
        return rank // launch.nprocs
    raise _contradiction(launch, found.launcher.title, found.shown(environ, "world_size", "rank"))


def _coordinator(launch: LaunchOptions, nodes: int, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and the port of process 0."""
    addresses = [one for one in detect(environ) if one.address is not None and one.address.host]
    addresses.sort(key=lambda one: one.address is not None and one.address.is_given)
    found = addresses[-1] if addresses else None
    address = None if found is None else found.address
    if launch.coordinator:
        host, port = split_address("--coordinator", launch.coordinator)
        given = address and address.is_given and (address.host, address.port or port)
        if found and given and given != (host, port):
            raise _contradiction(launch, found.launcher.title, found.shown(environ, "address"))
        return host, port
    if address is None:
        raise UserError(
            f"--nodes {nodes} needs the address of the first machine",
            why="the environment does not say it",
            fix="add --coordinator HOST:PORT, the same on all machines, such as "
            f"--coordinator 192.168.1.10:{DEFAULT_PORT}",
        )
    return address.host, address.port or DEFAULT_PORT


def _contradiction(launch: LaunchOptions, launcher: str, given: str) -> UserError:
    flags = [
        f"--nodes {launch.nodes}",
        f"--nprocs {launch.nprocs}",
        *([] if launch.node_rank is None else [f"--node-rank {launch.node_rank}"]),
        *([f"--coordinator {launch.coordinator}"] if launch.coordinator else []),
    ]
    return UserError(
        f"{' '.join(flags)} and {launcher} contradict each other",
        why=f"{launcher} says {given}",
        fix="start one launch on each machine, and leave out the flags or unset the variables that "
        "are wrong",
    )


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _misfit(nprocs: int, rank: int, world_size: int) -> UserError:
    firsts = range(0, world_size, nprocs)
    if world_size % nprocs:
        fix = f"export WORLD_SIZE={nprocs} times the number of machines"
    else:
        shown = [f"RANK={first}" for first in firsts]
        named = ", ".join(shown) if len(shown) < 5 else f"{shown[0]}, {shown[1]}, …, {shown[-1]}"
        fix = f"export one of {named}: RANK counts processes, not machines"
    return UserError(
        f"RANK={rank} WORLD_SIZE={world_size} and --nprocs {nprocs} do not fit together",
        why=f"each machine starts {counted(nprocs, 'process')} of {world_size}, and "
        "RANK is the number of its first one",
        fix=fix,
    )


def refuse_outer_launcher(
    nprocs: int, environ: Mapping[str, str], *, is_shared: bool = False
) -> None:
    """Raise if the environment says that this launch is one of several processes.

    The launch would overwrite the variables, and each group of processes would train a model of
    its own. If the run ``is_shared``, the launch follows MASTER_ADDR, RANK and WORLD_SIZE.
    """
    for launcher in LAUNCHERS:
        if (is_shared and launcher is ENVIRONMENT) or not launcher.started(environ):
            continue
        found = read_launcher(launcher, environ)
        if launcher is ENVIRONMENT and "rank" in found.numbers and not found.is_complete:
            # The same message as without launch.
            read_environment({name: environ[name] for name in found.variables.values()})
        if not _says_more(found):
            continue
        # Where process 0 is, and which process this is.
        address = () if found.address is None else found.address.variables
        names = (*address, *launcher.numbers["rank"], *launcher.numbers["world_size"])
        given = {name: text for name in names if (text := environ.get(name, "").strip())}
        shown = " ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(
            f"{launcher.title} and --nprocs {nprocs} describe different processes",
            why=f"{shown} says that this is one process among others, and the "
            f"{counted(nprocs, 'process')} of --nprocs {nprocs} would not join them: "
            "each launch would train a model of its own",
            fix="leave launch out, and start the command itself as each of these processes; or, "
            f"for processes on this machine only, run `unset {' '.join(given)}` first; or, for a "
            "launch on each of several machines, add --nodes with their number",
        )


def _says_more(found: Found) -> bool:
    """Whether a launcher mentions other processes, or a process 0 elsewhere."""
    size, address = found.numbers.get("world_size"), found.address
    return (
        (size or 1) > 1
        or found.numbers.get("rank", 0) > 0
        # One process alone connects to no other, whatever the address.
        or (size != 1 and address is not None and address.is_given and _is_elsewhere(address.host))
    )


def _is_elsewhere(host: str) -> bool:
    here = {"localhost", "::1", "[::1]", "0.0.0.0", socket.gethostname(), socket.getfqdn()}
    return host not in here and not host.startswith("127.")
