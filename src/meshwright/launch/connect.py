"""Inside a launched process: connecting to the others, and disconnecting."""

import os
import sys
from collections.abc import Mapping

from meshwright import processes
from meshwright.config.distributed_config import DistributedConfig
from meshwright.config.environment import read_environment, run_name
from meshwright.errors import EnvironmentProblem, LostPeer, UserError, first_line
from meshwright.processes.library_messages import is_lost_peer
from meshwright.processes.peers import explain_loss, leave_peers
from meshwright.runtime.attempts import ProcessRange
from meshwright.runtime.host_machine import VISIBLE_GPUS
from meshwright.runtime.jax_internals import jax_has_started


def connect_processes(
    simulate: int | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Connect this process to the others, as the environment says, before JAX starts.

    A single process is not connected. Devices are simulated if asked for, so many in all processes
    together.
    """
    environ = os.environ if environ is None else environ
    settings = DistributedConfig.from_environment(environ)
    if simulate is not None:
        # Devices of processes that did not come back are not simulated by the others.
        allowed = ProcessRange.from_environment(environ)
        full = settings.world_size if allowed is None else allowed.full
        own = devices_per_process(simulate, full, environ)
        from meshwright.mesh.simulate import simulate_devices

        simulate_devices(own)
    if settings.world_size == 1 or _connected():
        return
    if jax_has_started():
        raise EnvironmentProblem(
            f"it is too late to connect {settings.world_size} processes",
            why="JAX has already started its devices in this process",
            fix="unset WORLD_SIZE and RANK, or connect before anything uses JAX devices",
        )
    join_processes(settings, environ)


def join_processes(config: DistributedConfig, environ: Mapping[str, str]) -> None:
    """Connect this process to the others that the environment describes."""
    host = config.master_addr
    if config.num_nodes > 1 and "master_addr" not in read_environment(environ):
        raise UserError(
            f"the address of process 0 is not known to the {config.world_size} processes on "
            f"{config.num_nodes} machines",
            why="the environment does not say where process 0 runs",
            fix="export MASTER_ADDR=… in each process: the machine of process 0",
        )
    host = f"[{host}]" if ":" in host and "[" not in host else host
    processes.connect(
        f"{host}:{config.master_port}",
        config.world_size,
        config.rank,
        local_device_ids=own_device_ids(config.num_processes_per_node, config.local_rank, environ),
        run_name=run_name(environ),
        notify=lambda line: print(line, file=sys.stderr, flush=True),
    )


def own_device_ids(
    processes_per_node: int, local_rank: int, environ: Mapping[str, str]
) -> list[int] | None:
    """Return the GPUs of this process among the visible ones; None means all of them.

    Several processes on a node use one GPU each, unless each sees only one, or
    `meshwright launch` has assigned them.
    """
    if assigned := environ.get("JAX_LOCAL_DEVICE_IDS"):
        return [int(number) for number in assigned.split(",")]
    visible = next((environ[name] for name in VISIBLE_GPUS if environ.get(name)), "")
    if processes_per_node == 1 or len([part for part in visible.split(",") if part]) == 1:
        return None
    return [local_rank]


def devices_per_process(simulate: int, world_size: int, environ: Mapping[str, str]) -> int:
    """Return the number of simulated devices per process."""
    given = environ.get("JAX_NUM_CPU_DEVICES", "")
    if world_size > 1 and given.isdecimal() and int(given) * world_size != simulate:
        total = int(given) * world_size
        raise UserError(
            f"simulate={simulate} contradicts --devices-per-process {given}",
            why=f"{world_size} processes × {given} devices = {total}, not {simulate}",
            fix=f"write simulate={total} or leave one of the two out",
        )
    if simulate % world_size:
        below = simulate - simulate % world_size
        nearest = f"{below} or {below + world_size}" if below else str(world_size)
        raise UserError(
            f"simulate={simulate} cannot be divided over {world_size} processes",
            why="it is the number of devices in all processes, and each has the same number",
            fix=f"write simulate={nearest}",
        )
    return simulate // world_size


def disconnect_processes() -> None:
    """Disconnect once all processes are done; otherwise JAX reports a lost peer."""
    if _connected():
        import jax

        leave_peers()
        jax.distributed.shutdown()


def leave_at_once(code: int) -> None:
    """Exit a connected process that failed, without waiting for the others."""
    if _connected():
        leave_peers(f"it ended with exit code {code}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def explain_lost_peer(error: Exception) -> LostPeer | None:
    """Return an error if a collective failed because another process is gone, else None."""
    if not _connected() or not is_lost_peer(error):
        return None
    return explain_loss() or LostPeer(
        f"process {processes.process_index()} lost its connection to another process",
        why=first_line(error),
        fix="look at the output of the process that ended first",
    )


def is_main(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment makes this process 0, which prints, connected or not."""
    return DistributedConfig.from_environment(environ).is_main_process()


def _connected() -> bool:
    return processes.process_count() > 1
