"""The environment variables of each process: its rank, peers and devices."""

import re
import secrets
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from meshwright.config.environment import run_name
from meshwright.config.launchers import process_variables
from meshwright.errors import UserError
from meshwright.launch.options import LaunchOptions
from meshwright.launch.whole_run import WholeRun, find_run
from meshwright.processes import JOIN_TIMEOUT, LOST_SECONDS, LOST_TIMEOUT
from meshwright.runtime.host_machine import VISIBLE_GPUS
from meshwright.text.units import counted

_GPU_FILES = {"jax-cuda": "nvidia[0-9]*", "jax-rocm": "dri/renderD*"}
_FORCED_COUNT = re.compile(r"\s*--xla_force_host_platform_device_count=\S*")


def environments(
    launch: LaunchOptions,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    run: WholeRun | None = None,
    places: Sequence[int] | None = None,
) -> list[dict[str, str]]:
    """Return the environment of each process of this machine, in the order of their ranks.

    The run is found from the other arguments by default, and all places of this machine, each with
    devices of its own, are used. ``root`` is the file system with the device files.
    """
    places = range(launch.nprocs) if places is None else places
    run = find_run(launch, environ) if run is None else run
    base = {key: value for key, value in environ.items() if key not in process_variables()}
    if run.address.startswith("127."):
        # For scripts that call JAX themselves: by default it listens on every network interface.
        base["JAX_COORDINATOR_BIND_ADDRESS"] = f"{run.address}:{run.port}"
    base |= {
        "MASTER_ADDR": run.address,
        "MASTER_PORT": str(run.port),
        "WORLD_SIZE": str(run.world_size),
        "LOCAL_WORLD_SIZE": str(len(places)),
        # Lines appear when they are printed, not when a buffer is full.
        "PYTHONUNBUFFERED": "1",
    }
    # Processes of another run that come to this port by mistake are turned away.
    if name := run_name(environ) if run.is_shared else secrets.token_hex(8):
        base["MESHWRIGHT_LAUNCH_ID"] = name
    if launch.join_timeout is not None:
        base[JOIN_TIMEOUT] = f"{launch.join_timeout:g}"
    if launch.lost_timeout is not None:
        base[LOST_TIMEOUT] = f"{launch.lost_timeout:g}"
    elif (launch.nodes or 1) > 1:
        base.setdefault(LOST_TIMEOUT, f"{LOST_SECONDS:g}")
    # Otherwise JAX handles SIGTERM itself once connected, and the process does not stop.
    base.setdefault("JAX_ENABLE_PREEMPTION_SERVICE", "false")
    devices = _devices(launch, base, root)
    return [
        {**base, "RANK": str(run.first_rank + number), "LOCAL_RANK": str(number), **devices[place]}
        for number, place in enumerate(places)
    ]


def count_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return the number of GPUs JAX would use, without starting it; 0 means CPUs."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not re.match(r"cuda|rocm|gpu", platforms):
        return 0
    names = [distribution.name or "" for distribution in metadata.distributions()]
    for plugin, files in _GPU_FILES.items():
        if any(name.startswith(plugin) for name in names) and (found := _present(root, files)):
            listed = next((environ[name] for name in VISIBLE_GPUS if name in environ), None)
            chosen = [] if listed is None else [part for part in listed.split(",") if part.strip()]
            return found if listed is None else len([part for part in chosen if part != "-1"])
    return 0


def _present(root: Path, pattern: str) -> int:
    return len(list((root / "dev").glob(pattern)))


def _devices(launch: LaunchOptions, environ: Mapping[str, str], root: Path) -> list[dict[str, str]]:
    """Return the variables that assign devices to each process."""
    simulated = any(word.startswith("simulate=") for word in launch.program)
    gpus = 0 if simulated else count_gpus(environ, root)
    if gpus:
        return _divide(gpus, launch)
    has_tpu = "tpu" in environ.get("JAX_PLATFORMS", "tpu") and _present(root, "accel[0-9]*")
    if has_tpu and not simulated:
        raise UserError(
            "the TPU chips of a machine belong to one process",
            fix="run the command without launch, or set JAX_PLATFORMS=cpu for virtual devices",
        )
    own = {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    if "XLA_FLAGS" in environ:
        own["XLA_FLAGS"] = _FORCED_COUNT.sub("", environ["XLA_FLAGS"])
    if launch.devices_per_process is not None:
        own["JAX_NUM_CPU_DEVICES"] = str(launch.devices_per_process)
    return [own] * launch.nprocs


def _divide(gpus: int, launch: LaunchOptions) -> list[dict[str, str]]:
    each = launch.devices_per_process or gpus // launch.nprocs
    if not each or each * launch.nprocs > gpus:
        raise UserError(
            f"{counted(launch.nprocs, 'process')} with "
            f"{counted(max(each, 1), 'GPU')} each need {launch.nprocs * max(each, 1)} GPUs",
            why=f"this machine has {gpus}",
            fix=f"write --nprocs {gpus} or fewer; for virtual CPU devices set JAX_PLATFORMS=cpu",
        )
    starts = range(0, launch.nprocs * each, each)
    return [
        {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(start, start + each)))} for start in starts
    ]
