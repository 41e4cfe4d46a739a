"""Options of the compiler: faster programs on GPUs, and faster compilation for CPUs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

_ON_GPUS = {"xla_gpu_enable_triton_gemm": False}
"""Products by cuBLAS only: benchmarks/NOTES.md has the figures."""

WORTH_POLISHING = 1e11
"""Floating-point operations, over all runs of a program, that take longer in code that is not
polished than polishing takes."""

_NOT_POLISHED = {"xla_backend_optimization_level": 0}
"""Known to every compiler; how a program is partitioned does not change."""

_BY_OLD_EMITTERS = {"xla_cpu_use_fusion_emitters": False}
"""Known to compilers that have new ones for CPUs; together they are four times as fast."""


def gpu_options(platform: str, wanted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return options with which steps are faster on GPUs; none for other platforms.

    Args:
        platform: the platform of the devices.
        wanted: further options; those that this compiler does not know are left out.
    """
    if platform != "gpu":
        return {}
    return _known({**_ON_GPUS, **(wanted or {})})


def quick_options(flops: float = 0.0) -> dict[str, Any]:
    """Return options with which CPUs compile a program that runs a few times; none elsewhere.

    They change how machine code is generated, not the partitioned program it is generated from.

    Args:
        flops: floating-point operations of all runs together; if they are many, no options.
    """
    if flops >= WORTH_POLISHING or jax.default_backend() != "cpu":
        return {}
    return _NOT_POLISHED | _known(_BY_OLD_EMITTERS)


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value})(0)
    except jax.errors.JaxRuntimeError:
        return False
    return True
