"""Virtual CPU devices, so that any mesh can be tried on a laptop."""

from __future__ import annotations

import os

import jax

from meshwright.errors import UserError
from meshwright.jax_internals import jax_has_started

MOST_DEVICES = 1024
_THREADS_PER_DEVICE = 2


def simulate_devices(count: int) -> None:
    """Give this process ``count`` virtual CPU devices; must run before JAX starts its devices."""
    if not 1 <= count <= MOST_DEVICES:
        raise UserError(
            f"cannot simulate {count} devices", fix=f"write simulate=1 to simulate={MOST_DEVICES}"
        )
    if jax_has_started():
        present = jax.devices()
        if len(present) == count and present[0].platform == "cpu":
            return
        raise UserError(
            f"it is too late to simulate {count} devices",
            why=f"JAX has already started with {len(present)} {present[0].platform} device(s)",
            fix="call simulate_devices before anything that asks JAX for devices or makes an array",
        )
    # How XLA is told the threads its devices share. Each exchange between devices holds one until
    # all have come, and where they are no more than the devices, others may find none left.
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, _THREADS_PER_DEVICE * count)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
