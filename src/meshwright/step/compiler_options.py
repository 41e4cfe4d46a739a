"""Compiler options for GPUs: what is computed while they communicate, and what multiplies matrices.

XLA combines small collectives into large ones, which wait for the last of their parts; if they hold
the weights or gradients of several blocks, little is left to compute meanwhile. In a loop over
blocks, XLA waits for a collective in the iteration that starts it, unless an option carries it over
to the next one. A single device has no communication to hide, and the order that would hide it only
costs memory.

Triton joins a product with what is computed around it, unlike cuBLAS. That pays for the small
batched products of attention, recurrences and experts that no kernel evaluates, or one that leaves
them to the compiler, and only costs time where all products are large. benchmarks/NOTES.md has the
figures.

To hide communication, the scheduler puts off products for the gradients of weights, and what they
read stays in memory. That of convolutions is large, so a fence keeps the scheduler from it.

The compiler chooses among algorithms by running them on the device, which takes time from whatever
runs there. An evaluation is compiled while steps run, and without that choice unless it has
convolutions.
"""

from collections.abc import Iterator
from typing import Any

from meshwright.plan import Plan
from meshwright.program.blocks.block_lists import find_block_lists
from meshwright.program.jaxpr.equations import Equation, Jaxpr
from meshwright.program.jaxpr.walks import all_equations, called_programs
from meshwright.program.kernels.find_kernels import Kernels
from meshwright.program.kernels.fused_attention import AttentionKernel
from meshwright.program.trace.traced_loss import TracedLoss

SMALLEST_BYTES = 4 * 2**20
"""Smaller messages take as long as this one on most networks."""
_GATHERS_PER_BLOCK = 2
_SLACK = 1.2
"""Sizes are limits: a block's own arrays must stay below them."""
_HALF_BYTES, _FLOAT_BYTES = 2, 4

_CARRIED_OVER: dict[str, Any] = {
    f"xla_gpu_{name}_{kind}": value
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
    # Compilers know one of the two names.
    for name, value in (("pipeline", "COLLECTIVE_PIPELINING_MODE_ON"), ("enable_pipelined", True))
}

_FENCED: dict[str, Any] = {
    "xla_gpu_experimental_scheduler_memory_fencing_threshold_bytes": 16 * 2**20
}
"""What convolutions read is not kept to compute their gradients while devices communicate."""

_ALONE: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": False}


def collective_options(traced: TracedLoss, plan: Plan) -> dict[str, Any]:
    """Return the options for a step; some compilers may not know all of them."""
    if plan.num_devices == 1:
        return _ALONE
    shards, copies = plan.size("fsdp"), plan.size("data")
    if plan.size("pipe") > 1 or shards * copies == 1:
        return {}
    if any(step.stacked for step in traced.layout.step_leaves):
        return _CARRIED_OVER
    jaxpr = traced.closed.jaxpr
    convolves = _count(jaxpr, "conv_general_dilated") > _count(jaxpr, "dot_general")
    fences = _FENCED if convolves else {}
    elements = _largest_block(traced) / plan.size("tensor")
    if not elements:
        return fences
    weights = elements * (_FLOAT_BYTES if plan.precision == "no" else _HALF_BYTES)
    gradients = elements * _FLOAT_BYTES
    # More is hidden of halves, but products that are put off for them hold what was recomputed.
    reductions_per_block = 2 if plan.sharding.remat == "none" and not fences else 1
    limits = {
        "all_gather": _limit(weights / _GATHERS_PER_BLOCK),
        # Of these, the compiler counts what a device keeps.
        "reduce_scatter": _limit(gradients) // shards,
        "all_reduce": _limit(gradients / reductions_per_block),
    }
    sizes = {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind, size in limits.items()}
    return sizes | fences


def _limit(nbytes: float) -> int:
    return int(max(nbytes, SMALLEST_BYTES) * _SLACK)


def _largest_block(traced: TracedLoss) -> int:
    """Return the parameters of the largest repeated block; 0 if no blocks repeat."""
    params = [step.leaf for step in traced.layout.select("param")]
    paths = [
        tuple(f"{path}." for path in blocks.elements[first : first + blocks.period])
        for blocks in find_block_lists(traced.closed.jaxpr.eqns)
        for first in range(0, len(blocks.elements), blocks.period)
    ]
    sizes = (sum(leaf.size for leaf in params if leaf.path.startswith(block)) for block in paths)
    return max(sizes, default=0)


_APART: dict[str, Any] = {"xla_gpu_dot_merger_threshold_mb": 1}
"""Products of the same rows, joined, leave their biases and slices to other kernels. Small ones
take as long as their launch."""
_BY_CUBLAS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False, **_APART}


def product_options(jaxpr: Jaxpr, kernels: Kernels) -> dict[str, Any]:
    """Return the options for a program, some of whose equations are evaluated by kernels."""
    if any(_batched_products(jaxpr, kernels)):
        return {}
    found = (region.kernel for region in kernels.regions.values())
    names = (x.name for x in found if isinstance(x, AttentionKernel) and x.operands.function)
    return _APART if "xla" in names else _BY_CUBLAS


def _batched_products(jaxpr: Jaxpr, kernels: Kernels) -> Iterator[Equation]:
    for eqn in jaxpr.eqns:
        result = eqn.outvars[0] if eqn.outvars else None
        if result in kernels.skipped or result in kernels.regions:
            continue
        if eqn.primitive.name == "dot_general" and any(eqn.params["dimension_numbers"][1]):
            yield eqn
        for called, _ in called_programs(eqn):
            yield from _batched_products(called.jaxpr, kernels)


def evaluation_options(jaxpr: Jaxpr) -> dict[str, Any]:
    """Return the options for an evaluation: nothing is measured, and cuBLAS chooses by its rules.

    Triton has none, and its first tiles may be slow ones. Convolutions are measured: the first
    algorithm for one may take many times as long as the best.
    """
    if _count(jaxpr, "conv_general_dilated"):
        return {}
    return {"xla_gpu_autotune_level": 0, **_BY_CUBLAS}


def _count(jaxpr: Jaxpr, primitive: str) -> int:
    return sum(eqn.primitive.name == primitive for eqn, _ in all_equations(jaxpr))
