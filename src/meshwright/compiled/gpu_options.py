"""Compiler options with which training steps are faster on GPUs, each of them measured."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

_MEASURED = {"xla_gpu_enable_triton_gemm": False}
"""Products by cuBLAS only: benchmarks/NOTES.md has the figures."""


def gpu_options(platform: str, wanted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options this compiler knows; none for other platforms.

    Args:
        platform: the platform of the devices.
        wanted: further options, of which a compiler may not know all.
    """
    if platform != "gpu":
        return {}
    options = {**_MEASURED, **(wanted or {})}
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value})(0)
    except jax.errors.JaxRuntimeError:
        return False
    return True
