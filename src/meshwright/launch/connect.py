"""Inside a launched process: connecting to the others, and disconnecting."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from meshwright import processes
from meshwright.config.distributed_config import DistributedConfig
from meshwright.errors import EnvironmentProblem, LostPeer, UserError, first_line
from meshwright.processes.library_messages import is_lost_peer
from meshwright.runtime.attempts import ProcessRange
from meshwright.runtime.jax_internals import jax_has_started


def connect_processes(
    simulate: int | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Connect this process to the others, as the environment says, before JAX starts.

    A single process is not connected. Devices are simulated if asked for.

    Args:
        simulate: virtual CPU devices of all processes together.
        environ: environment variables with the rank and the address of process 0; `os.environ` by
            default.
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
    from meshwright.distributed.multinode import join_processes

    if jax_has_started():
        raise EnvironmentProblem(
            f"it is too late to connect {settings.world_size} processes",
            why="JAX has already started its devices in this process",
            fix="unset WORLD_SIZE and RANK, or connect before anything uses JAX devices",
        )
    join_processes(settings, environ)


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

        jax.distributed.shutdown()


def leave_at_once(code: int) -> None:
    """Exit a connected process that failed, without waiting for the others."""
    if _connected():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def explain_lost_peer(error: Exception) -> LostPeer | None:
    """Return an error if a collective failed because another process is gone, else None."""
    if not _connected() or not is_lost_peer(error):
        return None
    return LostPeer(
        f"process {processes.process_index()} lost its connection to another process",
        why=first_line(error),
        fix="look at the output of the process that ended first",
    )


def is_main(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment makes this process 0, which prints, connected or not."""
    return DistributedConfig.from_environment(environ).is_main_process()


def _connected() -> bool:
    return processes.process_count() > 1
