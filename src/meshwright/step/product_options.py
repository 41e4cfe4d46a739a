"""Compiler options for matrix products on GPUs: cuBLAS alone, or Triton as well.

Triton joins a product with what is computed around it. That pays for the small batched products of
attention, recurrences and experts that no kernel evaluates, and only costs time where all products
are large. benchmarks/NOTES.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.program.jaxpr.equations import Equation, Jaxpr
from meshwright.program.jaxpr.walks import called_programs
from meshwright.program.kernels.find_kernels import Kernels

_BY_CUBLAS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}


def product_options(jaxpr: Jaxpr, kernels: Kernels) -> dict[str, Any]:
    """Return the options for a program, some of whose equations are evaluated by kernels."""
    return {} if any(_batched_products(jaxpr, kernels)) else _BY_CUBLAS


def _batched_products(jaxpr: Jaxpr, kernels: Kernels) -> Iterator[Equation]:
    for eqn in jaxpr.eqns:
        result = eqn.outvars[0] if eqn.outvars else None
        if result in kernels.skipped or result in kernels.regions:
            continue
        if eqn.primitive.name == "dot_general" and any(eqn.params["dimension_numbers"][1]):
            yield eqn
        for called, _ in called_programs(eqn):
            yield from _batched_products(called.jaxpr, kernels)
