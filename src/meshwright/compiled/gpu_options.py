"""Compiler options with which training steps are faster on GPUs, each of them measured."""

from __future__ import annotations

import functools

import jax

_MEASURED = {"xla_gpu_enable_triton_gemm": False}
"""Products by cuBLAS only: benchmarks/NOTES.md has the figures."""


def gpu_options(platform: str) -> dict[str, bool]:
    """Return the options this compiler knows; none for other platforms."""
    return _known_options() if platform == "gpu" else {}


@functools.cache
def _known_options() -> dict[str, bool]:
    known: dict[str, bool] = {}
    for name, value in _MEASURED.items():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value})(0)
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known
