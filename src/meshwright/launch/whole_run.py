"""The run that a launch belongs to: all of it, or the processes of one machine among several."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.config.environment import read_environment
from meshwright.config.launchers import DEFAULT_PORT, ENVIRONMENT, Found, detect, split_address
from meshwright.errors import UserError
from meshwright.launch.options import LaunchOptions
from meshwright.text.units import counted

_NEEDED = ("MASTER_ADDR", "RANK", "WORLD_SIZE")
_PORT = "MASTER_PORT"
_STARTED = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables of processes that another launcher has started already."""


@dataclass(frozen=True)
class WholeRun:
    """The run that a launch belongs to.

    Attributes:
        address: the host of process 0.
        port: the port on which process 0 listens.
        first_rank: the number of the first process that the launch starts.
        world_size: the processes on all machines together.
        is_shared: whether the environment describes the run, and other machines may take part.
    """

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
            told = one.shown(environ, "node_rank", "rank", "world_size")
            raise _contradiction(launch, one.launcher.title, told)
    host, port = _coordinator(launch, nodes, environ)
    return WholeRun(host, port, rank * launch.nprocs, nodes * launch.nprocs, is_shared=True)


def _node_rank(launch: LaunchOptions, nodes: int, found: Found, environ: Mapping[str, str]) -> int:
    """Return the number of this machine, by a launcher that started one launch on each."""
    size, rank = found.numbers["world_size"], found.numbers["rank"]
    if size == nodes:
        return found.numbers.get("node_rank", rank)
    if (
        found.launcher is ENVIRONMENT
        and size == nodes * launch.nprocs
        and rank % launch.nprocs == 0
    ):
        # WORLD_SIZE may count processes, and RANK the first one of this machine.
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
        if (
            found
            and address
            and address.is_given
            and (address.host, address.port or port) != (host, port)
        ):
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


def _contradiction(launch: LaunchOptions, launcher: str, told: str) -> UserError:
    flags = [
        f"--nodes {launch.nodes}",
        f"--nprocs {launch.nprocs}",
        *([] if launch.node_rank is None else [f"--node-rank {launch.node_rank}"]),
        *([f"--coordinator {launch.coordinator}"] if launch.coordinator else []),
    ]
    return UserError(
        f"{' '.join(flags)} and {launcher} contradict each other",
        why=f"{launcher} says {told}",
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
        why=f"each machine starts {counted(nprocs, 'process', 'processes')} of {world_size}, and "
        "RANK is the number of its first one",
        fix=fix,
    )
