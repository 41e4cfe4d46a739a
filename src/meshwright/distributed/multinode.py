"""setup_multinode: connecting the processes of a run that the environment describes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

import jax

from meshwright import processes
from meshwright.config.environment import read_environment, run_name
from meshwright.errors import EnvironmentProblem, UserError
from meshwright.runtime.jax_internals import jax_has_started

if TYPE_CHECKING:
    from meshwright.config.distributed_config import DistributedConfig

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class ProcessInfo(TypedDict):
    """The position of this process in the run.

    Attributes:
        world_size: number of processes, by the environment.
        rank: number of this process, by the environment.
        local_rank: number of this process on its node.
        is_master: whether this is the main process.
        process_index: number of this process in JAX.
        process_count: number of processes in JAX.
        local_devices: number of devices of this process.
        global_devices: number of devices of all processes.
    """

    world_size: int
    rank: int
    local_rank: int
    is_master: bool
    process_index: int
    process_count: int
    local_devices: int
    global_devices: int


def setup_multinode() -> ProcessInfo:
    """Connect this process to the others and return its position in the run.

    It reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE (processes), RANK and LOCAL_RANK, or the variables
    of SLURM, MPI, JAX, Kubernetes or SkyPilot. With one process there is nothing to connect. Call
    it before anything else uses JAX.
    """
    from meshwright.config.distributed_config import DistributedConfig

    config = DistributedConfig.from_environment()
    if config.world_size > 1 and not jax.distributed.is_initialized():
        if jax_has_started():
            raise EnvironmentProblem(
                "it is too late to connect the processes",
                why="JAX has already started its devices in this process",
                fix="call setup_multinode() first, before asking JAX for devices or making an "
                "array",
            )
        join_processes(config, os.environ)
    if jax.process_count() != config.world_size:
        raise UserError(
            f"JAX runs {jax.process_count()} process(es), the environment says {config.world_size}",
            fix="start as many processes as WORLD_SIZE says",
        )
    return {
        "world_size": config.world_size,
        "rank": config.rank,
        "local_rank": config.local_rank,
        "is_master": config.is_main_process(),
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
        "local_devices": jax.local_device_count(),
        "global_devices": jax.device_count(),
    }


def own_device_ids(
    processes_per_node: int, local_rank: int, environ: Mapping[str, str]
) -> list[int] | None:
    """Return the GPUs of this process among the visible ones; None means all of them.

    Several processes on a node use one GPU each, unless each sees only one, or
    `meshwright launch` has assigned them.
    """
    if assigned := environ.get("JAX_LOCAL_DEVICE_IDS"):
        return [int(number) for number in assigned.split(",")]
    visible = next((environ[name] for name in _VISIBLE if environ.get(name)), "")
    if processes_per_node == 1 or len([part for part in visible.split(",") if part]) == 1:
        return None
    return [local_rank]


def join_processes(config: DistributedConfig, environ: Mapping[str, str]) -> None:
    """Connect this process to the others that the environment tells of.

    Args:
        config: the processes, read from the environment.
        environ: the environment variables.
    """
    host = config.master_addr
    if config.num_nodes > 1 and "master_addr" not in read_environment(environ):
        raise UserError(
            f"the address of process 0 is not known to the {config.world_size} processes on "
            f"{config.num_nodes} machines",
            why="whoever started them does not say where process 0 runs",
            fix="export MASTER_ADDR=… in each process: the machine of process 0",
        )
    processes.connect(
        f"[{host}]:{config.master_port}"
        if ":" in host.strip("[]") and "[" not in host
        else f"{host}:{config.master_port}",
        config.world_size,
        config.rank,
        local_device_ids=own_device_ids(config.num_processes_per_node, config.local_rank, environ),
        run_name=run_name(environ),
        notify=lambda line: print(line, file=sys.stderr, flush=True),
    )
