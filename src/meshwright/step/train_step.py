"""The step: (state, batch) → (state, metrics), one compiled program on any mesh."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.compiled.compile_program import (
    CompiledProgram,
    compile_program,
    known_options,
    quick_options,
)
from meshwright.compiled.kept_program import kept_program
from meshwright.pipeline.execute.exchanges import check_exchanges
from meshwright.pipeline.execute.pipelined_loss import PipelinedLoss
from meshwright.plan import Plan
from meshwright.program.trace.traced_loss import LossValue, TracedLoss
from meshwright.sharding.decide import Decision, batch_axes
from meshwright.sharding.placement import Placement
from meshwright.step.compiler_options import collective_options, product_options
from meshwright.step.gradients import (
    Gradients,
    accumulate_gradients,
    accumulate_locally,
    compute_gradients,
    finish_gradients,
)
from meshwright.step.objective import Objective
from meshwright.step.optimizer import FlatOptimizer
from meshwright.step.place_batch import split_strided
from meshwright.step.state import LossScale, TrainState, all_finite
from meshwright.step.step_program import planned_forward, sends_through_gloo
from meshwright.trees import placed_struct

Metrics = dict[str, Array]
HALTED = "halted"
"""The metric of a guarded step: whether this step or one before it was not finite."""
LossOfLeaves = Callable[[Sequence[Any], Sequence[Any]], LossValue]
"""From leaf values in layout order and batch leaves to the loss's value."""


@dataclass(frozen=True)
class StepShardings:
    """The shardings of a TrainState, leaf by leaf, and of every batch leaf."""

    state: TrainState
    batch: NamedSharding


class TrainStep:
    """One step as a compiled function.

    ``local`` is the loss of one device's samples, if each device computes its own gradients, and
    ``pipeline`` that by stages. ``wide`` computes in float64, for proofs, and compiles quickly. If
    ``guarded``, the first step whose loss or gradient is not finite leaves the state unchanged
    until ``halted`` is cleared.
    """

    def __init__(
        self,
        traced: TracedLoss,
        decision: Decision,
        plan: Plan,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        *,
        clip_norm: float | None = None,
        local: LossOfLeaves | None = None,
        pipeline: PipelinedLoss | None = None,
        wide: bool = False,
        guarded: bool = False,
    ) -> None:
        self._guarded, self._wide = guarded, wide
        self.traced, self.decision, self.plan, self.mesh = traced, decision, plan, mesh
        self._clip_norm = clip_norm
        self._local, self.pipeline = local, pipeline
        self._checked: dict[Any, Any] = {}
        self._ahead: tuple[Any, Future[Any]] | None = None
        self._param_numbers = traced.layout.numbers("param")
        self._state_numbers = traced.layout.numbers("state")
        placements = [decision.optimizer[n] for n in self._param_numbers]
        self.optimizer = FlatOptimizer(optimizer, traced.layout, placements, dict(plan.mesh))
        if pipeline is None:
            self._forward = planned_forward(traced, decision, plan, mesh, wide=wide)
        self.shardings = self._make_shardings()
        self._jit = functools.partial(
            jax.jit,
            donate_argnums=0,
            in_shardings=(self.shardings.state, self.shardings.batch),
            out_shardings=(self.shardings.state, NamedSharding(mesh, PartitionSpec())),
        )
        # JAX takes compiler options only where the step is not part of another program.
        self._traceable = self._jit(self._update)
        # A wide step is compiled like the reference: schedules compute in float32, where both must
        # round alike. Any other is compiled as it is trained, in proofs too.
        options = quick_options() if wide else {}
        if mesh.devices.flat[0].platform == "gpu":
            products = product_options(traced.closed.jaxpr, decision.kernels)
            options = known_options(products | collective_options(traced, plan)) | options
        self._options: dict[str, Any] = {"compiler_options": options} if options else {}
        self._jitted = self._jit(self._update, **self._options) if options else self._traceable

    def __call__(self, state: TrainState, batch: Sequence[Any]) -> tuple[TrainState, Metrics]:
        """Run one step on a batch's leaves; the old state is donated."""
        if any(isinstance(leaf, Tracer) for leaf in batch):
            return self._traceable(state, list(batch))
        # The first step may change the formats of the optimizer's state.
        if self._ahead and self._ahead[0] == _kinds(state, batch):
            return self._ahead[1].result()(state, list(batch))
        if self.pipeline is None:
            return self._jitted(state, list(batch))
        # A proof also runs the step on a state in float64.
        kinds = tuple((leaf.shape, str(leaf.dtype)) for leaf in (*state.params[:1], *batch))
        if kinds not in self._checked:
            self._checked[kinds] = self._compile(self._jitted.lower(state, list(batch)))
        return self._checked[kinds](state, list(batch))

    def compile_ahead(self, state: TrainState, batch: Sequence[Any], threads: Executor) -> None:
        """Trace the step now and compile it in another thread, for states and batches like these.

        Calls wait for it.
        """
        lowered = self._jitted.lower(state, list(batch))
        self._ahead = _kinds(state, batch), threads.submit(self._compile, lowered)

    def _compile(self, lowered: Any) -> Any:
        if self.pipeline is None:
            return lowered.compile()
        program = compile_program(lowered, partitioned=False)
        self.check(program)
        return program.compiled

    def check(self, program: CompiledProgram) -> None:
        """Raise if the stages of a compiled step would deadlock."""
        if self.pipeline is not None:
            check_exchanges(program.optimized, self.mesh)

    def lower(self, batch: Sequence[Any], key: str | None = None) -> Any:
        """Lower the step for compilation without running it.

        A key that stands for the step and all that its lowering depends on lets later processes
        load what this one has lowered.
        """
        arguments = self.abstract_state, list(batch)
        if key is not None:
            kept = kept_program(self._traceable, arguments, key, self._jit)
            if kept is not None:
                return self._jit(kept, **self._options).lower(*arguments)
        return self._jitted.lower(*arguments)

    def fresh_state(self, leaves: Sequence[Any]) -> TrainState:
        """Return the initial state for these values of the step's leaves (traceable)."""
        params = [leaves[n] for n in self._param_numbers]
        scale = LossScale.initial() if self.plan.precision == "fp16" else None
        return TrainState(
            params=params,
            model_state=[leaves[n] for n in self._state_numbers],
            optimizer=self.optimizer.init(params),
            step=jnp.zeros((), jnp.int32),
            loss_scale=scale,
            halted=jnp.zeros((), bool) if self._guarded else None,
        )

    def leaf_values(self, state: TrainState) -> list[Any]:
        """Return the values of the step's leaves in layout order."""
        return self._join(state.params, state.model_state)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """The state as ShapeDtypeStructs with shardings."""
        structs = [step.leaf.struct for step in self.traced.layout.step_leaves]
        abstract = jax.eval_shape(self.fresh_state, structs)
        return jax.tree.map(placed_struct, abstract, self.shardings.state)

    def _make_shardings(self) -> StepShardings:
        at_rest = self.decision.at_rest
        # Typed as Any: this TrainState holds shardings instead of arrays.
        replicated: Any = NamedSharding(self.mesh, PartitionSpec())
        state = TrainState(
            params=[self._sharding(at_rest[n]) for n in self._param_numbers],
            model_state=[self._sharding(at_rest[n]) for n in self._state_numbers],
            optimizer=[self._sharding(leaf.placement) for leaf in self.optimizer.leaves],
            step=replicated,
            loss_scale=LossScale(replicated, replicated, replicated)
            if self.plan.precision == "fp16"
            else None,
            halted=replicated if self._guarded else None,
        )
        return StepShardings(state, NamedSharding(self.mesh, self.decision.batch))

    def _sharding(self, placement: Placement) -> NamedSharding:
        return NamedSharding(self.mesh, placement.spec)

    def _update(self, state: TrainState, batch: list[Any]) -> tuple[TrainState, Metrics]:
        matmul: Any = None if self.plan.matmul == "default" else self.plan.matmul
        with jax.default_matmul_precision(matmul):
            gradients = self.gradients(state, batch)
            values = self._reduced(gradients.values)
            norm = optax.tree.norm(values)
            metrics = {"loss": gradients.loss, **gradients.metrics, "grad_norm": norm}
            objective = Objective(gradients.loss, values, self._evaluate(state, batch))
            values = self._clip(values, norm)
            params = self._constrain(gradients.params, self.decision.optimizer)
            params, optimizer = self.optimizer.update(
                values, state.optimizer, params, objective, wide=self._wide
            )
            after = replace(
                state,
                params=params,
                model_state=gradients.model_state,
                optimizer=optimizer,
                step=state.step + 1,
            )
            return self._accept(state, after, values, metrics)

    def gradients(self, state: TrainState, batch: Sequence[Any]) -> Gradients:
        """Compute loss and gradients without changing the state."""
        scale = None if state.loss_scale is None else state.loss_scale.scale
        count = self.plan.batch.gradient_accumulation_steps
        if count == 1 and self._local is None and self.pipeline is None:
            return compute_gradients(self._loss, state.params, state.model_state, batch, scale)
        microbatches = split_strided(batch, count, self.mesh, self.decision.batch)
        if self.pipeline is not None:
            leaves = self._join(state.params, state.model_state)
            result = self.pipeline(leaves, microbatches, scale)
            return finish_gradients(
                state.params, result.gradients, *result.losses, result.state, scale
            )
        if self._local is not None:
            local = self._local
            return accumulate_locally(
                lambda params, model_state, batch: local(self._join(params, model_state), batch),
                state.params,
                state.model_state,
                microbatches,
                every=self.plan.batch.sync_gradients_every,
                mesh=self.mesh,
                batch_axes=batch_axes(self.plan.mesh),
                joined=sends_through_gloo(self.mesh),
                scale=scale,
                written=self.traced.written_positions,
            )
        return accumulate_gradients(
            self._loss,
            state.params,
            state.model_state,
            microbatches,
            scale,
            self._reduced,
            self.traced.written_positions,
        )

    def _evaluate(
        self, state: TrainState, batch: list[Any]
    ) -> Callable[[Sequence[Any]], tuple[Array, list[Any]]]:
        """Return the loss and gradients of a batch as a function of the parameters."""

        def evaluate(params: Sequence[Any]) -> tuple[Array, list[Any]]:
            placed = self._constrain(params, self.decision.at_rest)
            gradients = self.gradients(replace(state, params=placed), batch)
            return gradients.loss, self._reduced(gradients.values)

        return evaluate

    def _loss(
        self, params: Sequence[Any], model_state: Sequence[Any], batch: Sequence[Any]
    ) -> LossValue:
        value = self._forward(self._join(params, model_state), batch)
        written = {
            position: jax.lax.with_sharding_constraint(new, self.shardings.state.params[position])
            for position, new in value.written.items()
        }
        return replace(value, written=written)

    def _join(self, params: Sequence[Any], model_state: Sequence[Any]) -> list[Any]:
        """Return parameters and model state in layout order."""
        values: dict[int, Any] = dict(zip(self._param_numbers, params, strict=True))
        values.update(zip(self._state_numbers, model_state, strict=True))
        return [values[n] for n in range(len(values))]

    def _clip(self, gradients: list[Any], norm: Array) -> list[Any]:
        if self._clip_norm is None:
            return gradients
        factor = jnp.minimum(1.0, self._clip_norm / jnp.maximum(norm, 1e-12))
        return [g * factor.astype(g.dtype) for g in gradients]

    def _reduced(self, gradients: list[Any]) -> list[Any]:
        return self._constrain(gradients, self.decision.gradients)

    def _constrain(self, values: Sequence[Any], placements: Sequence[Placement]) -> list[Any]:
        return [
            jax.lax.with_sharding_constraint(value, self._sharding(placements[n]))
            for value, n in zip(values, self._param_numbers, strict=True)
        ]

    def _accept(
        self, before: TrainState, after: TrainState, gradients: list[Any], metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        """Return the new state, or the old one after a loss or a gradient that is not finite.

        Loss and norm are values of the whole batch, so all devices decide alike.
        """
        scale, halted = before.loss_scale, before.halted
        if scale is None and halted is None:
            return after, metrics
        finite = jnp.isfinite(metrics["grad_norm"]) if scale is None else all_finite(gradients)
        if halted is not None:
            finite &= jnp.isfinite(metrics["loss"])
        applied = finite if halted is None else finite & ~halted
        # Selected as the optimizer has them, before parameters are gathered.
        old = replace(before, params=self._constrain(before.params, self.decision.optimizer))
        chosen = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old),
            _without_flags(after),
            _without_flags(old),
        )
        if halted is not None:
            # Loss scaling deals with overflows itself, as long as it can.
            halted |= ~finite if scale is None else ~finite & scale.smallest
            metrics[HALTED] = halted
        if scale is not None:
            scale = _scale_after(scale, finite, halted)
            metrics |= {"loss_scale": scale.scale, "skipped": scale.skipped}
        return replace(chosen, loss_scale=scale, halted=halted), metrics


def _without_flags(state: TrainState) -> TrainState:
    return replace(state, loss_scale=None, halted=None)


def _scale_after(scale: LossScale, finite: Array, halted: Array | None) -> LossScale:
    after = scale.after(finite)
    if halted is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(halted, old, new), after, scale)


def _kinds(*values: Any) -> list[tuple[Any, ...]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(values)]
