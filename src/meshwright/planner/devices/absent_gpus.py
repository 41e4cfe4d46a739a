"""NVIDIA GPUs that are not on this machine, and to compile programs for them all the same."""

import re
from contextlib import suppress
from importlib import metadata, util
from typing import Any

from meshwright.errors import EnvironmentProblem
from meshwright.hardware import Cores, Hardware

COMPILERS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
"""The packages with JAX's compiler for NVIDIA GPUs, the newest first."""

INSTALL = "install it with `pip install 'jax[cuda12]'`"
"""How to get that compiler."""

_RESERVED_KIB = 1
"""Shared memory that the driver keeps of each block of threads."""
_OLDEST_CUDNN = (9, 8)
"""Assumed where the installed release is not known."""


def can_compile_for(hardware: Hardware) -> bool:
    """Whether programs for these GPUs can be compiled on this machine, without any of them."""
    return hardware.chip.cores is not None and _installed_compiler() is not None


def absent_gpus(hardware: Hardware) -> list[Any]:
    """Return the GPUs of some hardware as JAX devices to compile for; nothing can run on them."""
    import jax
    from jax.experimental import topologies

    cores = hardware.chip.cores
    assert cores is not None
    # Slices × hosts × GPUs of a host.
    shape = f"1x{hardware.nodes}x{hardware.devices_per_node}"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=_describe(hardware, cores), topology=shape
        )
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        raise EnvironmentProblem(
            f"JAX cannot compile for {hardware} on this machine",
            why=str(error).partition("\n")[0],
            fix="write --on cpu to compile for virtual CPU devices",
        ) from None
    return list(topology.devices)


def cudnn_version() -> tuple[int, int]:
    """Return the installed release of cuDNN, whose attention the compiler calls."""
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with suppress(metadata.PackageNotFoundError):
            major, minor = metadata.version(name).split(".")[:2]
            return int(major), int(minor)
    return _OLDEST_CUDNN


def _installed_compiler() -> str | None:
    for name in COMPILERS:
        with suppress(ModuleNotFoundError):
            if util.find_spec(name) is not None:
                return name
    return None


def _describe(hardware: Hardware, cores: Cores) -> str:
    """Return what the compiler asks about a GPU, as the text of a protocol buffer."""
    chip, (major, minor) = hardware.chip, cores.capability.split(".")
    cuda = re.search(r"cuda(\d+)", _installed_compiler() or "")
    toolkit, (cudnn, release) = int(cuda[1]) if cuda else 12, cudnn_version()
    kind = chip.device_kinds[0] if chip.device_kinds else chip.name
    return f"""
        platform_name: "CUDA"
        device_description_str: "{kind}"
        dnn_version_info {{ major: {cudnn} minor: {release} }}
        runtime_version {{ major: {toolkit} minor: 0 patch: 0 }}
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {cores.count}
          fpus_per_core: 128
          clock_rate_ghz: {cores.clock_ghz}
          threads_per_core_limit: {cores.threads}
          threads_per_block_limit: 1024
          threads_per_warp: 32
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          shared_memory_per_core: {cores.shared_kib * 1024}
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {(cores.shared_kib - _RESERVED_KIB) * 1024}
          l2_cache_size: {cores.l2_mib * 2**20}
          memory_bandwidth: {int(chip.hbm_tb_per_s_per_device * 1e12)}
          device_memory_size: {int(chip.hbm_gb_per_device * 1e9)}
        }}
    """
