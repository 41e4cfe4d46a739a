"""Virtual CPU devices, to try any mesh on any machine."""

import os

import jax

from meshwright.errors import UserError
from meshwright.mesh.axes import is_whole
from meshwright.runtime.jax_internals import jax_has_started
from meshwright.text.units import counted

MAX_DEVICES = 1024
_THREADS_PER_DEVICE = 2


def simulate_devices(count: int) -> None:
    """Give this process ``count`` virtual CPU devices; must run before JAX starts its devices."""
    if not is_whole(count) or not 1 <= count <= MAX_DEVICES:
        raise UserError(
            f"cannot simulate {count!s:.60} devices",
            fix=f"write a whole number from 1 to {MAX_DEVICES}",
        )
    if jax_has_started():
        present = jax.devices()
        if len(present) == count and present[0].platform == "cpu":
            return
        raise UserError(
            f"it is too late to simulate {count} devices",
            why=f"JAX has already started with "
            f"{counted(len(present), f'{present[0].platform} device')}",
            fix="call simulate_devices before anything that uses JAX devices or arrays",
        )
    # The number of threads that XLA's devices share. Each collective blocks one thread per device
    # until all have arrived, so with too few threads other collectives could not start.
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, _THREADS_PER_DEVICE * count)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
