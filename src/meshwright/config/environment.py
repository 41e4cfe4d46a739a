"""Reading rank, world size and address from the environment variables of launchers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.config.base import shorten
from meshwright.errors import UserError

# Each key and the variables that set it, the most specific first.
_COMMON = {
    "world_size": ("WORLD_SIZE",),
    "rank": ("RANK",),
    "local_rank": ("LOCAL_RANK",),
    "num_processes_per_node": ("LOCAL_WORLD_SIZE",),
    "master_port": ("MASTER_PORT",),
}
# A step may use fewer nodes than its job, so the step's variables come before the job's.
_SLURM = {
    "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "rank": ("SLURM_PROCID",),
    "local_rank": ("SLURM_LOCALID",),
    "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
}
_SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_OPEN_MPI = {
    "world_size": ("OMPI_COMM_WORLD_SIZE",),
    "rank": ("OMPI_COMM_WORLD_RANK",),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
    "num_processes_per_node": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
}
_JAX = {"world_size": ("JAX_NUM_PROCESSES",), "rank": ("JAX_PROCESS_ID",)}
_JAX_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_TORCHRUN_LISTENS = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun if it listens on MASTER_PORT itself, which is then not free for process 0."""


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the process settings in the environment; RANK etc. override launchers."""
    settings: dict[str, Any] = {}
    in_slurm = is_slurm_task(environ)
    if in_slurm:
        settings |= _even_nodes(_integers(_SLURM, environ), _first(_SLURM_TASKS, environ)[1])
    elif "OMPI_COMM_WORLD_RANK" in environ:
        settings |= _even_nodes(_integers(_OPEN_MPI, environ))
    for own in (_read_jax(environ), _integers(_COMMON, environ)):
        if "world_size" in own and "rank" in own:
            # A full set of variables replaces the launcher's, whose node counts may not match.
            settings = {k: v for k, v in settings.items() if k.startswith("master_")}
        settings |= own
    if "master_port" in settings and environ.get(_TORCHRUN_LISTENS) == "True":
        settings["master_port"] = _next_port(settings["master_port"])
    _refuse_incomplete(settings, environ)
    if address := _first(("MASTER_ADDR",), environ)[1]:
        settings["master_addr"] = address
    elif in_slurm and (nodes := _first(_SLURM_NODES, environ)[1]):
        settings.setdefault("master_addr", first_host(nodes))
    if "rank" in settings:
        settings.setdefault("local_rank", 0)
    return settings


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task that srun started.

    A batch script has the variables of its job, and as its only process the rank 0, without being
    one of the job's tasks; what srun starts also has the variables of a step.
    """
    rank = environ.get("SLURM_PROCID", "").strip()
    return bool(rank) and (rank != "0" or bool(_first(_SLURM_STEP, environ)[0]))


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list such as ``gpu[003-007,12],login``."""
    match = re.match(r"((?:[^\[\],\s]|\[\w+[^\[\]]*\])+)(?:,|$)", nodelist)
    if match is None:
        raise UserError(f"cannot read the SLURM node list `{nodelist}`", fix="set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[1])


def _read_jax(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in JAX's own variables."""
    settings: dict[str, Any] = _integers(_JAX, environ)
    if len(settings) == len(_JAX) and not _first(("LOCAL_RANK",), environ)[1]:
        # As for JAX itself: a process uses all GPUs it sees.
        settings["num_processes_per_node"] = 1
    address = environ.get(_JAX_ADDRESS, "").strip()
    if not address:
        return settings
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(
            f"the environment variable {_JAX_ADDRESS} is `{shorten(address)}`",
            why="it must be a host and a port",
            fix=f"export {_JAX_ADDRESS}=node0:29500, or unset it",
        )
    return {**settings, "master_addr": host, "master_port": int(port)}


def _refuse_incomplete(settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise if JAX's variables tell of other processes, and not how to join them."""
    names = (_JAX["world_size"][0], _JAX["rank"][0], _JAX_ADDRESS)
    given = [name for name in names if environ.get(name, "").strip()]
    known = [settings.get("world_size"), settings.get("rank")]
    if not given or settings.get("world_size") == 1 or None not in known:
        return
    missing = [name for name, value in zip(names, known, strict=False) if value is None]
    shown = " ".join(f"{name}={environ[name].strip()}" for name in given)
    raise UserError(
        f"{shown} tells of other processes, and {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set",
        why="without joining them, each process would train a model of its own",
        fix=f"export {' '.join(f'{name}=…' for name in missing)} in each process, "
        f"or run `unset {' '.join(given)}` to train in this process alone",
    )


def _next_port(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def _first(variables: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the first variable that is set, and its value; two empty strings if none is."""
    texts = ((variable, environ.get(variable, "").strip()) for variable in variables)
    return next(((variable, text) for variable, text in texts if text), ("", ""))


def _integers(table: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> dict[str, int]:
    values: dict[str, int] = {}
    for key, variables in table.items():
        variable, text = _first(variables, environ)
        if not text:
            continue
        try:
            values[key] = int(text)
        except ValueError:
            raise UserError(
                f"the environment variable {variable} is `{shorten(text)}`",
                why="it must be a whole number",
                fix=f"export {variable}=… with a number, or unset it",
            ) from None
    return values


def _even_nodes(found: dict[str, int], tasks_per_node: str = "") -> dict[str, int]:
    """Drop node counts of uneven allocations, which have no single number of tasks per node.

    SLURM writes ``4(x2)`` for 4 tasks on each of 2 nodes, and ``4,3`` where they differ.
    """
    world = found.get("world_size", 0)
    counts = [found[key] for key in ("num_nodes", "num_processes_per_node") if found.get(key)]
    if "," in tasks_per_node or any(world % count for count in counts):
        return {k: v for k, v in found.items() if k not in ("num_nodes", "num_processes_per_node")}
    return found
