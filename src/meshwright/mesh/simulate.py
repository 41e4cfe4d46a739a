"""Virtual CPU devices, so that any mesh can be tried on a laptop."""

from __future__ import annotations

import os

import jax

from meshwright.errors import UserError
from meshwright.units import counted

MAX_DEVICES = 1024
_THREADS_PER_DEVICE = 2


def simulate_devices(count: int) -> None:
    """Give this process ``count`` virtual CPU devices; must run before JAX starts its devices."""
    if not 1 <= count <= MAX_DEVICES:
        raise UserError(
            f"cannot simulate {count} devices", fix=f"write simulate=1 to simulate={MAX_DEVICES}"
        )
    if jax_has_started():
        present = jax.devices()
        if len(present) == count and present[0].platform == "cpu":
            return
        raise UserError(
            f"it is too late to simulate {count} devices",
            why=f"JAX has already started with "
            f"{counted(len(present), f'{present[0].platform} device')}",
            fix="call simulate_devices before anything that asks JAX for devices or makes an array",
        )
    # How XLA is told the threads its devices share. Each exchange between devices holds one until
    # all have come, and where they are no more than the devices, others may find none left.
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, _THREADS_PER_DEVICE * count)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def jax_has_started() -> bool:
    """Whether JAX has already created its devices (no public API says so)."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())
