"""The programs of a model that estimates are made from, each traced and scheduled once."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from meshwright.config.batch import solve_batch
from meshwright.config.schema import Precision, ShardingConfig
from meshwright.errors import UserError
from meshwright.hardware import Hardware
from meshwright.mesh.build import build_mesh
from meshwright.pipeline.divide.cut import BlockCut, cut_blocks, ordered_by_stage
from meshwright.plan import Plan
from meshwright.planner.workload.gpu_rules import PLATFORMS
from meshwright.planner.workload.gradient_program import (
    SAMPLES,
    GradientProgram,
    TracedGradients,
    Variant,
    schedule_gradients,
    trace_gradients,
)
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.flops import count_flops
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.traced_loss import Loss, TracedLoss
from meshwright.sharding.decide import dim_classes
from meshwright.step.step_program import StepProgram, step_program, unstaged_program
from meshwright.trees import Batch

Blocks = Literal["unroll", "scan"]


class TracedPrograms:
    """The loss of a few samples on one device, in each format and each way to run its blocks."""

    def __init__(
        self, loss: Loss, leaves: ModelLeaves, samples: Batch, precision: Precision
    ) -> None:
        self._loss, self._leaves, self._samples = loss, leaves, samples
        self._precision: Precision = precision
        self.program = functools.cache(self._make_program)
        self.cut = functools.cache(self._make_cut)
        self.classes = functools.cache(lambda *program: dim_classes(self.traced(*program)))
        # The arithmetic of one sample, both passes.
        flops = lambda p: count_flops(self.program(p, "unroll").traced) / SAMPLES  # noqa: E731
        self.flops_per_sample = functools.cache(flops)
        self._ordered = functools.cache(self._order_by_stage)

    @functools.cached_property
    def num_blocks(self) -> int:
        """The number of repeated blocks, which pipeline stages divide; 0 without such blocks."""
        try:
            return self.cut(self._precision).num_blocks
        except UserError:
            return 0

    @functools.cached_property
    def keeps_statistics(self) -> bool:
        """Whether the model keeps statistics of the samples, such as the means of BatchNorm.

        Counters of random streams, which are whole numbers, do not depend on samples.
        """
        traced = self.program(self._precision, "unroll").traced
        jaxpr = traced.closed.jaxpr
        after = zip(traced.kept, jaxpr.outvars[traced.num_results :], strict=True)
        changed = [number for number, value in after if value is not jaxpr.invars[number]]
        return any(jnp.issubdtype(traced.leaves[n].dtype, jnp.inexact) for n in changed)

    def step_program(self, plan: Plan) -> StepProgram:
        """Return the program whose leaves a plan's step has."""
        stages = plan.size("pipe")
        if stages > 1:
            return self._ordered(plan.precision, stages, plan.num_chunks)
        return self.program(plan.precision, plan.sharding.blocks)

    def traced_blocks(self, plan: Plan) -> Blocks:
        """Return how blocks run in the program whose gradients are traced for a plan.

        Blocks that run one by one follow from a loop over them, which is traced faster.
        """
        return "scan" if self.num_blocks else blocks_of(plan)

    def _make_program(self, precision: Precision, blocks: Blocks) -> StepProgram:
        """Return the program without stages."""
        plan = Plan(
            mesh={},
            batch=solve_batch(replicas=1, global_batch_size=SAMPLES),
            sharding=ShardingConfig(blocks=blocks),
            precision=precision,
        )
        if blocks == "unroll":
            return step_program(self._loss, self._leaves, self._samples, plan)
        return unstaged_program(self.program(precision, "unroll").traced, plan)

    def _make_cut(self, precision: Precision) -> BlockCut:
        """Return the program cut into its blocks, which is the same for any number of stages."""
        rolled = roll_program(self.program(precision, "unroll").traced, even_connections=True)
        return cut_blocks(rolled.traced, rolled.remarks)

    def _order_by_stage(self, precision: Precision, stages: int, num_chunks: int) -> StepProgram:
        cut = ordered_by_stage(self.cut(precision), stages, num_chunks)
        return StepProgram(cut.traced, cut, ())

    def traced(self, precision: Precision, blocks: Blocks | None) -> TracedLoss:
        """Return the program whose blocks run this way; None for one in any number of stages."""
        made = self.cut(precision) if blocks is None else self.program(precision, blocks)
        return made.traced


def blocks_of(plan: Plan) -> Blocks:
    """Return how the blocks of a plan run; stages scan theirs."""
    return "scan" if plan.size("pipe") > 1 else plan.sharding.blocks


class GradientPrograms:
    """The scheduled gradients of a model's programs."""

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
        traced = self._programs.traced(precision, blocks)
        classes = self._programs.classes(precision, blocks)
        return trace_gradients(traced, classes, self._mesh, variant)


def variant_of(plan: Plan, hardware: Hardware) -> Variant:
    """Return what the gradient program of a plan depends on, besides formats and blocks."""
    sharding, platform = plan.sharding, PLATFORMS[hardware.chip.platform]
    variant = Variant(
        sharding.remat,
        # Whatever else is recomputed is the same with and without gathers.
        gathers=plan.gathers_twice and sharding.remat == "none",
        # Joined or not, products are saved; what is recomputed is the same.
        rows=plan.size("tensor") == plan.size("context") == 1 or sharding.remat in ("dots", "full"),
        kernels=plan.kernels,
        platform=platform,
    )
    # What is in memory, which is all that these choices change much, is not predicted for CPUs.
    return least_work(variant) if platform == "cpu" else variant


def least_work(variant: Variant) -> Variant:
    """Return the variant that does least, with the same remat; a mesh only adds to it."""
    return variant._replace(gathers=False, rows=True)
