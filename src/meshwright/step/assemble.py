"""Building the step from a model, a loss, an optimizer and a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from meshwright.config.batch import GLOBAL_BATCH_SIZE
from meshwright.errors import Setting, UserError
from meshwright.mesh.build import Device, build_mesh
from meshwright.pipeline.pipeline_report import PipelineReport, pipeline_report
from meshwright.pipeline.place import pipelined_loss
from meshwright.plan import Plan
from meshwright.program.evaluate.dependencies import select_outputs
from meshwright.program.kernels.regions import describe
from meshwright.program.trace.build_model import (
    ModelSource,
    abstract_model,
    build_values,
    describe_model,
    trace_values,
)
from meshwright.program.trace.choose_adapters import adapt_model
from meshwright.program.trace.layout import StepLeaf
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.replaced_jax import device_reads
from meshwright.program.trace.traced_loss import Loss, Model, TracedLoss
from meshwright.program.trace.trained_leaves import Trained
from meshwright.runtime.activity import activity
from meshwright.runtime.garbage import few_collections
from meshwright.runtime.user_code import doing
from meshwright.sharding.decide import Decision
from meshwright.sharding.placement import Placement, to_spec
from meshwright.step.average import no_average
from meshwright.step.initial_state import draw_leaves, start_from
from meshwright.step.loss_warnings import (
    broadcast_by_mistake,
    changes_with_microbatches,
    explaining_whole_batches,
)
from meshwright.step.place_batch import place_batch
from meshwright.step.state import TrainState, copied
from meshwright.step.step_program import (
    StepProgram,
    decide_program,
    local_forward,
    per_device_program,
    planned_remat,
    step_program,
)
from meshwright.step.train_step import TrainStep
from meshwright.text.units import counted
from meshwright.trees import Batch, divide_batch

FEW_SAMPLES = 8
"""Means and variances over fewer samples are mostly noise."""


@dataclass(frozen=True)
class Assembled:
    """A step and what it was made from.

    ``traced`` is the loss of one microbatch, and ``remarks`` say where the step differs from what
    the plan asked for. Without stages, there is no pipeline report.
    """

    step: TrainStep
    model_leaves: ModelLeaves
    traced: TracedLoss
    decision: Decision
    plan: Plan
    mesh: Mesh
    remarks: tuple[str, ...]
    pipeline_report: PipelineReport | None
    batch_tree: Any
    _build: ModelSource
    _make_step: Callable[..., TrainStep]

    @property
    def kernels(self) -> list[str]:
        """Which parts of the program kernels evaluate, and why others run as written."""
        return describe(self.decision.kernels.uses)

    def init(
        self, seed: int, *, given: Mapping[int, Any] | None = None, quickly: bool = False
    ) -> TrainState:
        """Initialize the model and the optimizer state, each leaf with its sharding.

        Random values of the leaves ``given`` by number, placed as the step expects them, are never
        computed. ``quickly`` compiles for a single run instead of for speed.
        """
        given, layout = given or {}, self.traced.layout
        if len(given) == len(layout.step_leaves):
            return start_from(self.step, [given[n] for n in range(len(given))])
        shardings = self.step.leaf_values(self.step.shardings.state)
        traced = trace_values(self._build, self.model_leaves, seed)
        if traced is not None:
            leaves = draw_leaves(*traced, layout, shardings, given=given, quickly=quickly)
            return start_from(self.step, leaves)
        values = build_values(self._build, self.model_leaves, seed)
        if not given:
            return self.start(values)
        joined = layout.from_canonical(values)
        placed = [given.get(n, jax.device_put(joined[n], s)) for n, s in enumerate(shardings)]
        return start_from(self.step, placed)

    @cached_property
    def unchanged(self) -> tuple[str, ...]:
        """Paths of the frozen weights that no step changes, if checkpoints leave them out."""
        if not self.model_leaves.keeps_base:
            return ()
        jaxpr, layout = self.traced.closed.jaxpr, self.traced.layout
        after = zip(self.traced.kept, jaxpr.outvars[self.traced.num_results :], strict=True)
        same = [number for number, atom in after if atom is jaxpr.invars[number]]
        sources = [source for number in same for source in layout.step_leaves[number].sources]
        return tuple(layout.leaves[n].path for n in sources if layout.leaves[n].is_frozen)

    def with_optimizer(
        self, optimizer: optax.GradientTransformation, *, wide: bool = False
    ) -> Assembled:
        """Return the same with a step of another optimizer; ``wide`` computes in float64."""
        return replace(self, step=self._make_step(optimizer=optimizer, wide=wide))

    def abstract_model(self) -> Model:
        """Return the model with shapes instead of arrays."""
        return abstract_model(self._build)

    def adopt(self, model: Model, seed: int = 0) -> TrainState:
        """Start from an existing model, its leaves placed on the mesh; a seed draws adapters."""
        return self.start(self.model_leaves.values(model, jax.random.key(seed)))

    def start(self, values: Sequence[Any]) -> TrainState:
        """Start from values of the model's leaves in canonical order."""
        # Onto the mesh first: they may be on other devices.
        placed = jax.device_put(list(values), self._canonical_shardings())
        fresh = jax.jit(lambda leaves: self._fresh(leaves), out_shardings=self.step.shardings.state)
        return fresh(placed)

    def abstract_start(self, values: Sequence[Any]) -> TrainState:
        """Return the shapes and formats of what `start` returns."""
        return jax.eval_shape(lambda values: self._fresh(values), list(values))

    def _fresh(self, values: list[Any]) -> TrainState:
        return self.step.fresh_state(self.traced.layout.from_canonical(values))

    def _canonical_shardings(self) -> list[NamedSharding]:
        shardings: dict[int, NamedSharding] = {}
        steps = self.traced.layout.step_leaves
        for step, placement in zip(steps, self.decision.at_rest, strict=True):
            shardings |= dict.fromkeys(step.sources, piece_sharding(self.mesh, placement, step))
        return [shardings[number] for number in range(len(shardings))]

    def canonical_params(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return values of the step's parameter leaves (or their gradients) by canonical path."""
        by_path: dict[str, Any] = {}
        for step, value in zip(self.traced.layout.select("param"), values, strict=True):
            paths = [self.traced.layout.leaves[source].path for source in step.sources]
            by_path.update(zip(paths, step.split(value), strict=True))
        return by_path

    def canonical(self, state: TrainState) -> dict[str, Any]:
        """Return the model's leaves by canonical path."""
        values = self.traced.layout.to_canonical(self.step.leaf_values(state))
        return dict(zip((leaf.path for leaf in self.traced.layout.leaves), values, strict=True))

    def model(self, state: TrainState) -> Model:
        """Return the user's model with the values of a state, in evaluation mode."""
        values = self.traced.layout.to_canonical(self.step.leaf_values(state))
        model = self.model_leaves.merge(values)
        set_eval_mode(model)
        return model

    def snapshot(self, state: TrainState) -> Model:
        """Return the model of a state with arrays of its own, which no later step donates."""
        params, others = copied((state.params, state.model_state))
        return self.model(replace(state, params=params, model_state=others))

    def averaged(self, state: TrainState) -> TrainState:
        """Return the state with the moving average of its parameters in their place."""
        if not self.step.optimizer.averages:
            raise no_average()
        shardings: Any = self.step.shardings.state.params
        average = jax.jit(self.step.optimizer.average, out_shardings=shardings)
        return replace(state, params=average(state.optimizer))

    def put_batch(self, batch: Batch) -> list[Any]:
        """Place the leaves of a host batch on the mesh."""
        return place_batch(batch, self.step.shardings.batch, self.plan.batch.global_batch_size)


def piece_sharding(mesh: Mesh, placement: Placement, step: StepLeaf | None) -> NamedSharding:
    """Return the sharding of a piece of a leaf: that of the leaf without the stack dim."""
    stacked = step is not None and step.stacked
    return NamedSharding(mesh, to_spec(placement.dims[1:] if stacked else placement.dims))


def set_eval_mode(model: Any) -> None:
    """Set a model, or each model of a dict, to evaluation: no dropout, running statistics."""
    for part in model.values() if isinstance(model, dict) else (model,):
        part.eval()


@activity("tracing the loss")
@few_collections()
def assemble(
    model: ModelSource,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    batch: Batch,
    *,
    clip_norm: float | None = None,
    trainable: Trained = nnx.Param,
    devices: Sequence[Device] | None = None,
    wide: bool = False,
    guarded: bool = False,
) -> Assembled:
    """Trace the loss, choose placements and build the step; nothing is compiled yet.

    The batch is global, as arrays or shapes. ``trainable`` is an NNX filter, or adapters. ``wide``
    computes in float64, for proofs; a ``guarded`` step is not applied if it is not finite.
    """
    mesh = build_mesh(plan.mesh, devices)
    with doing("building the model"), device_reads(model, loss) as reads:
        model_leaves = describe_model(model, trainable)
    micro = _microbatch(batch, plan)
    with explaining_whole_batches(loss, model_leaves, batch, plan):
        model_leaves = adapt_model(model_leaves, loss, micro)
        program = step_program(loss, model_leaves, micro, plan)
    local_program = per_device_program(loss, model_leaves, micro, plan, mesh)
    traced = program.traced
    remarks = [*dict.fromkeys([*reads, *program.remarks]), *_few_samples(traced, plan)]
    remarks += broadcast_by_mistake(traced)
    decision = decide_program(program, plan, mesh)
    remarks += changes_with_microbatches(loss, model_leaves, micro, plan, decision.classes)
    parts = (program, local_program, decision, plan, mesh)
    make_step = functools.partial(_step, *parts, clip_norm=clip_norm, guarded=guarded)
    step = make_step(optimizer=optimizer, wide=wide)
    report = None if step.pipeline is None else pipeline_report(step.pipeline)
    said = (*remarks, *(report.warnings if report else ()), *decision.ignored)
    tree = jax.tree.structure(batch)
    return Assembled(
        step, model_leaves, traced, decision, plan, mesh, said, report, tree, model, make_step
    )


def _step(
    program: StepProgram,
    local_program: StepProgram | None,
    decision: Decision,
    plan: Plan,
    mesh: Mesh,
    *,
    optimizer: optax.GradientTransformation,
    clip_norm: float | None,
    wide: bool,
    guarded: bool,
) -> TrainStep:
    local = pipeline = None
    if program.cut is not None:
        pipeline = pipelined_loss(
            program.cut,
            decision,
            plan,
            mesh,
            remat=planned_remat(decision, plan),
            wide=wide,
            per_device=None if local_program is None else local_program.cut,
        )
    elif local_program is not None:
        local = local_forward(local_program.traced, decision, plan, mesh, wide=wide)
    return TrainStep(
        program.traced,
        decision,
        plan,
        mesh,
        optimizer,
        clip_norm=clip_norm,
        local=local,
        pipeline=pipeline,
        wide=wide,
        guarded=guarded,
    )


def _few_samples(traced: TracedLoss, plan: Plan) -> list[str]:
    """Warn if batch statistics are computed from very few samples."""
    count = plan.batch.gradient_accumulation_steps
    each = plan.batch.global_batch_size // count
    statistic = None if count == 1 or each >= FEW_SAMPLES else _batch_statistic(traced)
    if statistic is None:
        return []
    fewer = max(1, plan.batch.global_batch_size // FEW_SAMPLES)
    staged = plan.size("pipe") > 1
    key = "pipeline.num_microbatches" if staged else "training.gradient_accumulation_steps"
    return [
        f"`{statistic}` is a statistic of one microbatch at a time, and the {count} microbatches "
        f"of a step have {counted(each, 'sample')} each; for better statistics set "
        f"{Setting(key, fewer)} or less, or a larger batch"
    ]


def _batch_statistic(traced: TracedLoss) -> str | None:
    """Return the path of a statistic that depends on the batch, if the model has one."""
    states = [step.leaf for step in traced.layout.select("state")]
    for number, leaf in enumerate(states, start=traced.num_results):
        if leaf.variable == "BatchStat":
            _, read = select_outputs(traced.closed, [number])
            if any(n >= len(traced.layout.step_leaves) for n in read):
                return leaf.path
    return None


def _microbatch(batch: Batch, plan: Plan) -> Batch:
    """Return the shapes of one microbatch of a global batch."""
    count = plan.batch.gradient_accumulation_steps
    size = plan.batch.global_batch_size
    for leaf in jax.tree.leaves(batch):
        if not leaf.shape or leaf.shape[0] != size:
            raise UserError(
                "the batch does not have the number of samples in the plan",
                why=f"an array of shape {tuple(leaf.shape)} for a global batch of {size}",
                fix=f"give batches of {size} samples, or set {GLOBAL_BATCH_SIZE}",
            )
    return divide_batch(batch, count)
