"""Refusing to launch inside another launcher: its variables say that there are other processes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.config.environment import is_slurm_task
from meshwright.errors import UserError
from meshwright.units import counted


@dataclass(frozen=True)
class _Source:
    """The variables by which a launcher describes its processes.

    Attributes:
        name: whose variables they are.
        sizes: the number of processes, the most specific variable first.
        ranks: the number of this process.
        addresses: the address of process 0.
        applies: whether they describe this process, and not only its job.
    """

    name: str
    sizes: tuple[str, ...]
    ranks: tuple[str, ...]
    addresses: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, str]], bool] = lambda _: True


_ENVIRONMENT = _Source("the environment", ("WORLD_SIZE",), ("RANK",), ("MASTER_ADDR",))
_SOURCES = (
    _ENVIRONMENT,
    _Source(
        "SLURM",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_PROCID",),
        applies=is_slurm_task,
    ),
    _Source("Open MPI", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",)),
    _Source("PMI", ("PMI_SIZE",), ("PMI_RANK",)),
    _Source("JAX", ("JAX_NUM_PROCESSES",), ("JAX_PROCESS_ID",), ("JAX_COORDINATOR_ADDRESS",)),
)


def refuse_outer_launcher(
    nprocs: int, environ: Mapping[str, str], *, is_shared: bool = False
) -> None:
    """Raise if the environment says that this launch is one of several processes.

    The launch would overwrite the variables, and each group of processes would train a model of
    its own. If the run ``is_shared``, the launch follows MASTER_ADDR, RANK and WORLD_SIZE.
    """
    for source in _SOURCES:
        if is_shared and source is _ENVIRONMENT:
            continue
        given = _variables(source, environ)
        if not given or not _says_more(source, given):
            continue
        shown = " ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(
            f"{source.name} and --nprocs {nprocs} describe different processes",
            why=f"{shown} says that this is one process among others, and --nprocs {nprocs} starts "
            f"{counted(nprocs, 'process', 'processes')} that know nothing of them: each launch "
            "would train a model of its own",
            fix="leave launch out, and start the command itself as each of these processes; or, "
            f"for processes on this machine only, run `unset {' '.join(given)}` first; or, for a "
            "launch on each of several machines, export MASTER_ADDR, RANK and WORLD_SIZE alone",
        )


def _variables(source: _Source, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a source that are set."""
    if not source.applies(environ):
        return {}
    names = (*source.addresses, *source.ranks, *source.sizes)
    return {name: text for name in names if (text := environ.get(name, "").strip())}


def _says_more(source: _Source, given: Mapping[str, str]) -> bool:
    """Whether the variables tell of other processes, or of a process 0 elsewhere."""
    # Of several variables for one size, the first that is set decides; text that is no number
    # decides nothing.
    sizes = [given[name] for name in source.sizes if name in given][:1]
    ranks = [given[name] for name in source.ranks if name in given]
    addresses = [given[name] for name in source.addresses if name in given]
    return (
        any(text.isdecimal() and int(text) > 1 for text in sizes)
        or any(text.isdecimal() and int(text) > 0 for text in ranks)
        # One process alone does not connect to anybody, wherever that may be.
        or ("1" not in sizes and any(_is_elsewhere(address) for address in addresses))
    )


def _is_elsewhere(address: str) -> bool:
    host = address.rpartition(":")[0] if address.count(":") == 1 else address
    here = {"localhost", "::1", "[::1]", "0.0.0.0", socket.gethostname(), socket.getfqdn()}
    return host not in here and not host.startswith("127.")
