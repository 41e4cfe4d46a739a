"""The loss and its gradients as scheduled kernels, traced once for two samples of one device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from meshwright.config.schema import KernelChoice, ShardingConfig
from meshwright.planner.workload.array_operations import Operations, list_operations, unroll
from meshwright.planner.workload.in_memory import Timeline, find_lifetimes
from meshwright.planner.workload.kernel_schedule import schedule
from meshwright.planner.workload.stage_parts import BlockParts, find_blocks
from meshwright.planner.workload.work_table import WorkTable
from meshwright.program.dims.classes import DimClasses, LeafLabel, find_dim_classes
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import aval_of
from meshwright.program.kernels.chunked_loss import LossKernel
from meshwright.program.kernels.find_kernels import KernelSearch
from meshwright.program.on_mesh.remat import choose_remat
from meshwright.program.trace.traced_loss import TracedLoss
from meshwright.sharding.decide import decide
from meshwright.step.gradients import compute_gradients
from meshwright.step.step_program import forward_on

SAMPLES = 2
"""Samples that programs are traced for. A dim of size one would not be recognized as samples."""


class Variant(NamedTuple):
    """What a program depends on besides the model.

    Weights may be gathered block by block; with ``rows``, products may join all dims of activations
    but their features.
    """

    remat: str
    gathers: bool
    rows: bool
    kernels: KernelChoice
    platform: str


class LossParts(NamedTuple):
    """How a loss is computed in parts; with the defaults, in one.

    ``row_limit`` has the most rows of a part, by class of the logits' last dim; ``token_rows`` are
    the logits' rows of one sample; ``sums`` are bytes of the gradient of the last projection, to
    which all parts add.
    """

    row_limit: Mapping[int, int] = {}
    token_rows: float = 1.0
    sums: int = 0


@dataclass(frozen=True)
class TracedGradients:
    """A loss and its gradients as operations; the first results are those of ``trained`` leaves."""

    operations: Operations
    classes: DimClasses
    trained: Sequence[int]
    loss_parts: LossParts


@dataclass(frozen=True)
class GradientProgram:
    """A loss and its gradients for a few samples, as kernels; blocks are None if not rolled."""

    work: WorkTable
    timeline: Timeline
    classes: DimClasses
    blocks: BlockParts | None
    loss_parts: LossParts


def trace_gradients(
    traced: TracedLoss, classes: DimClasses, mesh: Mesh, variant: Variant
) -> TracedGradients:
    """Trace the gradients of a loss of `SAMPLES` samples, on a mesh of one device."""
    search = KernelSearch(
        variant.kernels,
        platform=variant.platform,
        rows=variant.rows,
        planned=True,
        sparing=variant.remat != "none",
    )
    decision = decide(traced, {}, ShardingConfig(), search=search, classes=classes)
    remat = choose_remat(variant.remat, keep_gathered=not variant.gathers)
    forward = forward_on(traced, decision, MeshView(mesh, planned_for=variant.platform), remat)
    leaves = traced.layout.step_leaves
    trained, other = traced.layout.numbers("param"), traced.layout.numbers("state")

    def loss(params: Sequence[Any], state: Sequence[Any], batch: Sequence[Any]) -> Any:
        values = dict(zip((*trained, *other), (*params, *state), strict=True))
        return forward([values[n] for n in range(len(leaves))], batch)

    def gradients(values: Sequence[Any], batch: Sequence[Any]) -> Any:
        params, state = ([values[n] for n in numbers] for numbers in (trained, other))
        found = compute_gradients(loss, params, state, batch)
        return found.values, found.loss, found.metrics, found.model_state

    structs = [step.leaf.struct for step in leaves]
    batch = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in traced.batch]
    closed = jax.make_jaxpr(gradients)(structs, batch)
    labels = [LeafLabel("param" if s.leaf.is_weight else "state", s.leaf.path) for s in leaves]
    labels += [LeafLabel("batch", leaf.path) for leaf in traced.batch]
    found = find_dim_classes(closed, labels)
    weights = frozenset(n for n, step in enumerate(leaves) if step.leaf.is_weight)
    operations = list_operations(found.root, weights)
    parts = _loss_parts(decision.kernels.regions.values(), found)
    return TracedGradients(operations, found, trained, parts)


def schedule_gradients(
    traced: TracedGradients, platform: str, *, unrolled: bool
) -> GradientProgram:
    """Return the kernels of traced gradients; ``unrolled`` blocks run one by one, not in loops."""
    operations = traced.operations
    outputs = [[] if array is None else [array] for array in operations.outputs]
    if unrolled:
        operations, outputs = unroll(operations)
    for number, arrays in zip(traced.trained, outputs, strict=False):
        for array in arrays:
            array.gradient = number
    kernels = schedule(operations, platform)
    return GradientProgram(
        WorkTable(kernels),
        Timeline(find_lifetimes(kernels)),
        traced.classes,
        find_blocks(kernels),
        traced.loss_parts,
    )


def _loss_parts(regions: Any, classes: DimClasses) -> LossParts:
    limits: dict[int, int] = {}
    rows, sums = 1.0, 0
    for region in regions:
        if not isinstance(region.kernel, LossKernel):
            continue
        match = region.kernel.match
        shape = aval_of(match.product.outvars[0]).shape
        ids = {
            dim[0].id
            for leaf in classes.leaves
            for dim in leaf.dims
            if len(dim) == 1 and dim[0].size == shape[-1]
        }
        limits |= dict.fromkeys(ids, region.kernel.most_rows)
        rows = max(rows, math.prod(shape[:-1]) / SAMPLES)
        sums += 4 * math.prod(aval_of(match.kernel).shape)
    return LossParts(limits, rows, sums)
