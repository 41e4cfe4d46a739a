"""The run that a launch belongs to: all of it, or the processes of one machine among several."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.config.environment import read_environment
from meshwright.errors import UserError
from meshwright.units import counted

_NEEDED = ("MASTER_ADDR", "RANK", "WORLD_SIZE")
_STARTED = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables of processes that another launcher has started already."""

_DEFAULT_PORT = 29500


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


def find_run(nprocs: int, environ: Mapping[str, str]) -> WholeRun:
    """Return the run of a launch of ``nprocs`` processes.

    With MASTER_ADDR, RANK and WORLD_SIZE, the launch starts the processes from RANK on of a run of
    WORLD_SIZE processes. Otherwise it starts a run of its own.
    """
    given = [name for name in _NEEDED if environ.get(name, "").strip()]
    started = any(environ.get(name, "").strip() for name in _STARTED)
    if len(given) < len(_NEEDED) or started or environ["WORLD_SIZE"].strip() == "1":
        return WholeRun("127.0.0.1", free_port(), 0, nprocs, is_shared=False)
    settings = read_environment(environ)
    rank, world_size = settings["rank"], settings["world_size"]
    if rank % nprocs or world_size % nprocs or not 0 <= rank < world_size:
        raise _misfit(nprocs, rank, world_size)
    port = settings.get("master_port", _DEFAULT_PORT)
    return WholeRun(settings["master_addr"], port, rank, world_size, is_shared=True)


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
