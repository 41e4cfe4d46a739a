"""setup_multinode: connecting the processes of a run, as the environment describes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

from meshwright.errors import EnvironmentProblem, UserError, first_line
from meshwright.jax_internals import jax_has_started

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def setup_multinode() -> dict[str, Any]:
    """Connect this process with the others and say where it stands.

    Reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE (processes), RANK and LOCAL_RANK, or what SLURM or
    Open MPI set. With one process it only reports. Call it before anything else uses JAX.

    Returns:
        world_size, rank, local_rank and is_master of this process; process_index and
        process_count as JAX counts them; local_devices (of this process) and global_devices.
    """
    from meshwright.config.distributed_config import DistributedConfig

    config = DistributedConfig.from_environment()
    if config.world_size > 1 and not jax.distributed.is_initialized():
        _connect(config)
    if jax.process_count() != config.world_size:
        raise UserError(
            f"JAX runs {jax.process_count()} process(es), the environment says {config.world_size}",
            fix="start the processes and set WORLD_SIZE in the same place",
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
    """Return the GPU this process owns among those it sees; None means all of them.

    Several processes on a node take one GPU each, unless each sees only its own already, or
    `meshwright launch` has given each its own.
    """
    if given := environ.get("JAX_LOCAL_DEVICE_IDS"):
        return [int(number) for number in given.split(",")]
    visible = next((environ[name] for name in _VISIBLE if environ.get(name)), "")
    if processes_per_node == 1 or len([part for part in visible.split(",") if part]) == 1:
        return None
    return [local_rank]


def _connect(config: Any) -> None:
    address = f"{config.master_addr}:{config.master_port}"
    if jax_has_started():
        raise EnvironmentProblem(
            "it is too late to connect the processes",
            why="JAX has already started its devices in this process",
            fix="call setup_multinode() first, before asking JAX for devices or making an array",
        )
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=config.world_size,
            process_id=config.rank,
            local_device_ids=own_device_ids(
                config.num_processes_per_node, config.local_rank, os.environ
            ),
            # Everything is given above; detection would only override "all GPUs" under SLURM.
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"process {config.rank} of {config.world_size} could not join at {address}",
            why=first_line(error),
            fix="check that every process is started and reaches MASTER_ADDR:MASTER_PORT",
        ) from error
