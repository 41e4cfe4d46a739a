"""Facts about the machine: versions, system, environment, ranks, memory, devices."""

import os
import platform
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwright.config.distributed_config import DistributedConfig
from meshwright.config.launchers import LAUNCHERS, detect, first
from meshwright.errors import UserError
from meshwright.text.masking import mask_value

PACKAGES = {
    "meshwright": "meshwright",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "grain": "grain",
    "hydra": "hydra-core",
    "pydantic": "pydantic",
    "numpy": "numpy",
}
"""Required packages: the name in the report and that of the distribution."""

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")
"""Packages that let JAX use an accelerator."""

_VARIABLES = re.compile(
    r"(JAX|XLA|NCCL|MASTER|SLURM|OMPI|PMI|SKYPILOT|MESHWRIGHT|HYDRA)_\w+"
    r"|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK"
    r"|JOB_COMPLETION_INDEX"
)
_ACCELERATOR_FILES = {
    "NVIDIA GPU": "dev/nvidia[0-9]*",
    "AMD GPU": "dev/kfd",
    "TPU": "dev/accel[0-9]*",
}


def versions() -> dict[str, str | None]:
    """Return installed versions; None for missing packages; plugins only if installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found |= dict.fromkeys(PACKAGES)
    for name, package in (PACKAGES | {plugin: plugin for plugin in PLUGINS}).items():
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    return found


def system() -> dict[str, Any]:
    """Return the operating system, the processor and the cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = os.cpu_count() or 1
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": cores,
        "usable_cores": len(affinity(0)) if affinity else cores,
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that affect a run, with secrets hidden."""
    return {
        name: mask_value(name, value)
        for name, value in sorted(environ.items())
        if _VARIABLES.fullmatch(name)
    }


def ranks(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what each launcher says about this process; None for values that are not numbers.

    ``variables`` names the variable of each value.
    """
    found: list[dict[str, Any]] = []
    # The innermost launcher, which decides, comes first.
    for launcher in reversed(LAUNCHERS):
        # Only a started process has a rank; an allocation may set the size.
        numbers = launcher.numbers
        if not first(numbers["rank"], environ)[0] or not launcher.started(environ):
            continue
        keys = "rank", "world_size", "local_rank"
        given = {key: first(numbers.get(key, ()), environ) for key in keys}
        found.append(
            {
                "source": launcher.name,
                **{key: _integer(text) for key, (_, text) in given.items()},
                "variables": {key: name for key, (name, _) in given.items() if name},
            }
        )
    return found


def coordinator(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return where process 0 listens, and the variable that says so; None for one process."""
    try:
        settings = DistributedConfig.from_environment(environ)
        addresses = [(one.address, one.launcher.name) for one in detect(environ) if one.address]
    except UserError:
        return None
    if settings.world_size == 1:
        return None
    source = next(
        (
            {"source": name, "variable": address.variables[0]}
            for address, name in reversed(addresses)
            if address.host == settings.master_addr
        ),
        {"source": "default", "variable": None},
    )
    return {"address": settings.master_addr, "port": settings.master_port, **source}


def disk() -> dict[str, int]:
    """Return the size and free space in bytes of the disk the current folder is on."""
    usage = shutil.disk_usage(".")
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def accelerators(root: Path = Path("/")) -> list[str]:
    """Return the kinds of accelerator in this machine, even if JAX cannot use them."""
    return [kind for kind, files in _ACCELERATOR_FILES.items() if any(root.glob(files))]


def device(jax_device: Any) -> dict[str, Any]:
    """Return the id, kind, process and, if reported, the memory of a JAX device."""
    # A machine is also examined where JAX cannot be imported.
    from meshwright.compiled.memory import memory_stats

    stats = memory_stats(jax_device)
    return {
        "id": jax_device.id,
        "kind": jax_device.device_kind,
        "process": jax_device.process_index,
        "memory_total_bytes": stats.get("bytes_limit"),
        "memory_used_bytes": stats.get("bytes_in_use"),
    }


def _integer(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None
