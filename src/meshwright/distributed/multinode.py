"""setup_multinode: connecting the processes of a run that the environment describes."""

from typing import TypedDict

import jax

from meshwright.config.distributed_config import DistributedConfig
from meshwright.errors import UserError
from meshwright.launch.connect import connect_processes


class ProcessInfo(TypedDict):
    """The position of this process in the run: by the environment, its node, and JAX."""

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
    config = DistributedConfig.from_environment()
    connect_processes()
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
