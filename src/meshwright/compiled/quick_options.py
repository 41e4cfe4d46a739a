"""Compiler options for programs that run once or twice: machine code need not be polished."""

from __future__ import annotations

import functools

import jax

_NOT_POLISHED = {"xla_backend_optimization_level": 0}
"""Known to every compiler; how a program is partitioned does not change."""

_BY_OLD_EMITTERS = {"xla_cpu_use_fusion_emitters": False}
"""Known to compilers that have new ones for CPUs; together they are four times as fast."""


@functools.cache
def quick_options() -> dict[str, int | bool]:
    """Return options with which this compiler is fast on CPUs; none for other devices."""
    if jax.default_backend() != "cpu":
        return {}
    options = _NOT_POLISHED | _BY_OLD_EMITTERS
    try:
        jax.jit(lambda x: x + 1, compiler_options=options)(0)
    except jax.errors.JaxRuntimeError:
        return _NOT_POLISHED
    return options
