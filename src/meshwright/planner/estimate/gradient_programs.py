"""The kernels of a plan's gradients, scheduled once for all plans that share them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax

from meshwright.config.schema import Precision
from meshwright.hardware import Hardware
from meshwright.mesh.build import build_mesh
from meshwright.plan import Plan
from meshwright.planner.estimate.traced_programs import Blocks, TracedPrograms, blocks_of
from meshwright.planner.workload.gradient_program import (
    GradientProgram,
    TracedGradients,
    Variant,
    schedule_gradients,
    trace_gradients,
)

PLATFORMS: Mapping[str, str] = {"cuda": "gpu", "rocm": "gpu", "tpu": "tpu", "cpu": "cpu"}
"""By the platform of a chip, whose kernels it runs."""


class GradientPrograms:
    """The scheduled gradients of a model's programs.

    Args:
        programs: the programs.
    """

    def __init__(self, programs: TracedPrograms) -> None:
        self._programs = programs
        self._mesh = build_mesh({}, jax.devices()[:1])
        self._scheduled = functools.cache(self._schedule)
        self._traced = functools.cache(self._trace)

    def of(self, plan: Plan, variant: Variant) -> GradientProgram:
        """Return the gradients of a plan's microbatch, for a few samples and one device."""
        as_traced = self._programs.traced_blocks(plan)
        return self._scheduled(plan.precision, variant, as_traced, blocks_of(plan))

    def _schedule(
        self, precision: Precision, variant: Variant, as_traced: Blocks, blocks: Blocks
    ) -> GradientProgram:
        traced = self._traced(precision, variant, as_traced)
        return schedule_gradients(traced, variant.platform, unrolled=blocks != as_traced)

    def _trace(self, precision: Precision, variant: Variant, blocks: Blocks) -> TracedGradients:
        traced = self._programs.program(precision, blocks).traced
        classes = self._programs.classes(precision, blocks)
        return trace_gradients(traced, classes, self._mesh, variant)


def variant_of(plan: Plan, hardware: Hardware) -> Variant:
    """Return what the gradient program of a plan depends on, besides formats and blocks."""
    sharding = plan.sharding
    return Variant(
        sharding.remat,
        # Whatever else is computed again is the same with and without gathers.
        gathers=gathers_twice(plan) and sharding.remat == "none",
        # Joined or not, products are saved; what is computed again is the same.
        rows=plan.size("tensor") == 1 or sharding.remat in ("dots", "full"),
        kernels=plan.kernels,
        platform=PLATFORMS[hardware.chip.platform],
    )


def gathers_twice(plan: Plan) -> bool:
    """Whether the weights of a block are gathered for each of its passes."""
    sharding = plan.sharding
    return plan.size("fsdp") > 1 and sharding.zero == 3 and not sharding.keep_gathered


def least_work(variant: Variant) -> Variant:
    """Return the variant that does least, with the same remat.

    A mesh only adds to it: weights are gathered, products are divided, stages wait.
    """
    return variant._replace(gathers=False, rows=True)
