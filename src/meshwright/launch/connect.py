"""Inside a launched process: joining the others as the environment says, and leaving them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from meshwright import processes
from meshwright.config.distributed import DistributedConfig
from meshwright.errors import EnvironmentProblem, UserError
from meshwright.jax_internals import jax_has_started

_RUNTIME_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
_LOST = re.compile(
    r"connection (reset|closed|refused)|broken pipe|socket closed|peer|nccl.*(remote|system) error"
    r"|UNAVAILABLE|DEADLINE_EXCEEDED",
    re.IGNORECASE,
)
"""How Gloo, NCCL and the coordinator say that nobody answers."""


def connect_processes(
    simulate: int | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Connect this process to the others the environment names, before JAX starts.

    With one process nothing is connected. Devices are simulated if asked for.

    Args:
        simulate: virtual CPU devices of all processes together.
        environ: where the rank and the address of process 0 are read from; this process's own.
    """
    environ = os.environ if environ is None else environ
    place = DistributedConfig.from_environment(environ)
    if simulate is not None:
        own = devices_of_each(simulate, place.world_size, environ)
        from meshwright.mesh.simulate import simulate_devices

        simulate_devices(own)
    if place.world_size == 1 or _connected():
        return
    from meshwright.distributed.multinode import own_device_ids

    if jax_has_started():
        raise EnvironmentProblem(
            f"it is too late to connect {place.world_size} processes",
            why="JAX has already started its devices in this process",
            fix="unset WORLD_SIZE and RANK, or connect before anything asks JAX for devices",
        )
    processes.connect(
        f"{place.master_addr}:{place.master_port}",
        place.world_size,
        place.rank,
        local_device_ids=own_device_ids(place.num_processes_per_node, place.local_rank, environ),
    )


def devices_of_each(simulate: int, world_size: int, environ: Mapping[str, str]) -> int:
    """Return how many of the simulated devices each process has."""
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
            why="it counts the devices of all processes together, and each has equally many",
            fix=f"write simulate={nearest}",
        )
    return simulate // world_size


def disconnect_processes() -> None:
    """Wait for the others and part in peace; without this JAX reports a lost peer."""
    if _connected():
        import jax

        jax.distributed.shutdown()


def leave_at_once(code: int) -> None:
    """End a connected process that failed, without the farewell that waits for the others."""
    if _connected():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def explain_lost_peer(error: Exception) -> EnvironmentProblem | None:
    """Return what a person should read if an exchange failed because another process is gone."""
    text = str(error).partition("\n")[0]
    if not _connected() or type(error).__name__ not in _RUNTIME_ERRORS or not _LOST.search(text):
        return None
    return EnvironmentProblem(
        f"process {processes.process_index()} lost another process during an exchange",
        why=text,
        fix="the process that ended first says why",
    )


def is_main(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment makes this process the one that prints, connected yet or not."""
    return DistributedConfig.from_environment(environ).is_main_process()


def _connected() -> bool:
    return processes.process_count() > 1
