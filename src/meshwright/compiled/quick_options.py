"""Compiler options for programs that run a few times: machine code need not be polished."""

from __future__ import annotations

import functools

import jax

WORTH_POLISHING = 1e11
"""Floating-point operations, over all runs of a program, that take longer in code that is not
polished than polishing takes."""

_NOT_POLISHED = {"xla_backend_optimization_level": 0}
"""Known to every compiler; how a program is partitioned does not change."""

_BY_OLD_EMITTERS = {"xla_cpu_use_fusion_emitters": False}
"""Known to compilers that have new ones for CPUs; together they are four times as fast."""


def quick_options(flops: float = 0.0) -> dict[str, int | bool]:
    """Return options with which this compiler is fast on CPUs; none for other devices.

    They change how machine code is generated, not the partitioned program it is generated from.

    Args:
        flops: floating-point operations of all runs together; if they are many, no options.
    """
    return _known_options() if flops < WORTH_POLISHING else {}


@functools.cache
def _known_options() -> dict[str, int | bool]:
    if jax.default_backend() != "cpu":
        return {}
    options = _NOT_POLISHED | _BY_OLD_EMITTERS
    try:
        jax.jit(lambda x: x + 1, compiler_options=options)(0)
    except jax.errors.JaxRuntimeError:
        return _NOT_POLISHED
    return options
