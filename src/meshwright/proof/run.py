"""`verify`: training on one device and on the mesh, in float64 and in the plan's precision."""

import datetime
import functools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from meshwright.compiled.compile_program import quick_options
from meshwright.compiled.memory import explaining_shortage, tell_shortage
from meshwright.config.argument_checks import (
    check_clip_norm,
    check_count,
    check_kind,
    check_optimizer,
    check_takes,
    clear_arguments,
)
from meshwright.config.schema import Precision
from meshwright.data.batches import read_batch
from meshwright.errors import ANY, Setting, UserError
from meshwright.inputs.checks import check_loss, check_trainable
from meshwright.mesh.build import Device, check_devices
from meshwright.plan import Plan
from meshwright.processes import process_count
from meshwright.program.flops import count_flops
from meshwright.program.trace.build_model import ModelSource, abstract_model, initial_values
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, TracedLoss, trace_loss
from meshwright.program.trace.trained_leaves import Trained
from meshwright.proof.certificate import Certificate, Comparison
from meshwright.proof.compare import (
    Gaps,
    Masks,
    ObservedRun,
    exact_gaps,
    fetch,
    judge,
    loss_gaps,
    metric_gaps,
    null_leaves,
    where_defined,
)
from meshwright.proof.losses import Gradient, taken_by_nnx_jit, traced_gradient, written_gradient
from meshwright.proof.mesh_run import recording_gradients, steps_on_mesh, train_on_mesh
from meshwright.proof.nulls import masks_of_step, null_parts
from meshwright.proof.reference import GRAD_NORM, OptaxUpdate, Reference
from meshwright.proof.rounding import Rounding, random_draws, rounding_of
from meshwright.proof.step_by_step import (
    ComparedStep,
    OwnPrecision,
    compare_steps,
    perturbed,
    widened,
)
from meshwright.runtime.activity import activity, show_on_terminal
from meshwright.runtime.versions import package_versions
from meshwright.step.assemble import Assembled, assemble
from meshwright.trees import Batch, divide_batch, is_key

_PACKAGES = ("meshwright", "jax", "flax", "optax")
FLOAT64_TOLERANCE = 1e-10
FLOAT64_UNIT, FLOAT32_UNIT = 2.0**-53, 2.0**-24

HOW_FLOAT64 = "the mesh against one device, relative to each leaf's largest value"
HOW_WRITTEN = "one device in float32 against the float64 reference of the first step"

INITIAL_TOLERANCE = 1e-5
"""For float32 values. The same random numbers are drawn everywhere, but what is computed from them
may be rounded differently, such as the decomposition behind an orthogonal matrix."""

NOT_WRITTEN = (
    "the loss as its author wrote it: nnx.jit does not accept a model with static attributes that "
    "cannot be hashed, such as lists, or the loss alone does not say what adapters with dropout or "
    "conversations that share rows do"
)
WRITTEN_NOT_FINITE = (
    "the loss as its author wrote it: on one device, in the model's own precision, it or its "
    "gradient is not finite"
)


def _or_of_trainer(function: Callable[..., Certificate]) -> Callable[..., Certificate]:
    """Let a trainer that is given instead of a model verify itself."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Certificate:
        if args and callable(getattr(args[0], "assemble", None)):
            return args[0].verify(*args[1:], **given)
        return function(*args, **given)

    return called


@_or_of_trainer
@clear_arguments("mw.verify")
def verify(
    model: ModelSource,
    loss: Loss,
    plan: Plan,
    batches: Callable[[int], Batch],
    *,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 5,
    clip_norm: float | None = None,
    seed: int = 0,
    trainable: Trained = nnx.Param,
    devices: Sequence[Device] | None = None,
    guarded: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Compare training under a plan with training on one device.

    ``mw.verify(trainer, batch)`` is `Trainer.verify`.

    Args:
        model: builds the model from `nnx.Rngs`.
        loss: ``loss(model, batch)``.
        plan: the plan to verify.
        batches: returns the global batch of a step, given its number.
        optimizer: any optax transformation; AdamW by default.
        steps: steps to compare in float64.
        clip_norm: largest global gradient norm.
        seed: seed of the initialization.
        trainable: NNX filter of what is trained, or adapters.
        devices: devices of the mesh; all by default.
        guarded: whether the step that is trained leaves out steps that are not finite.
        say: called with the name of each phase when it starts.
    """
    optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
    _check_single_process()
    check_takes("model", model, ("rngs",))
    check_loss(loss)
    check_kind("plan", plan, Plan, "write an mw.Plan")
    check_takes("batches", batches, ("step",))
    check_optimizer(optimizer)
    check_count("steps", steps)
    check_clip_norm(clip_norm)
    check_trainable(trainable)
    check_devices(devices)
    # In 64-bit mode the model itself would differ; only the evaluation is widened.
    with show_on_terminal(), jax.enable_x64(False):
        with activity("reading the data"):
            global_batches = [read_batch(batches(n)) for n in range(steps)]
        doing = "comparing the mesh with one device"
        with explaining_shortage(functools.partial(tell_shortage, doing=doing, fix=_smaller())):
            proof = _Proof(
                model, loss, plan, global_batches, optimizer=optimizer, clip_norm=clip_norm,
                seed=seed, trainable=trainable, devices=devices, guarded=guarded,
            )  # fmt: skip
            return proof.certify(say)


def _smaller() -> str:
    return (
        "verify also trains in float64, and on one device alone; verify the same mesh with a "
        f"smaller batch ({Setting('training.global_batch_size', ANY)}), fewer blocks or smaller "
        "layers: what it proves is how the step is sharded"
    )


def _check_single_process() -> None:
    if process_count() > 1:
        raise UserError(
            f"verify cannot run in {process_count()} processes",
            why="it compares the devices of a mesh with one of them, number by number",
            fix=f"run it in one process with simulated devices: {Setting('simulate', 8)}",
        )


@dataclass(eq=False)
class _Proof:
    """The inputs of a comparison, and its parts.

    ``traced`` is the loss of one microbatch, before any pass; ``written`` its gradient as its
    author wrote it, None if `nnx.jit` does not accept the model. FLOPs are those of all steps
    together.
    """

    model: ModelSource
    loss: Loss
    plan: Plan
    batches: list[Batch]
    optimizer: optax.GradientTransformation
    clip_norm: float | None
    seed: int
    trainable: Trained
    devices: Sequence[Device] | None
    guarded: bool
    written: Gradient | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        loss, plan, first = self.loss, self.plan, self.batches[0]
        assembled = assemble(
            self.model,
            loss,
            recording_gradients(self.optimizer),
            plan,
            first,
            clip_norm=self.clip_norm,
            trainable=self.trainable,
            devices=self.devices,
            guarded=self.guarded,
        )
        self.traced = traced = _trace(loss, assembled, first, plan.precision)
        if traced.written:
            recording = recording_gradients(self.optimizer, params_too=True)
            assembled = assembled.with_optimizer(recording)
        self.assembled = assembled
        in_float32 = plan.precision == "no"
        self.traced_in_float32 = traced if in_float32 else _trace(loss, assembled, first, "no")
        count = len(self.batches) * plan.batch.gradient_accumulation_steps
        self.flops = count * count_flops(traced)
        as_shapes = abstract_model(self.model)
        if taken_by_nnx_jit(as_shapes):
            self.written = written_gradient(
                as_shapes, loss, self.trainable, assembled.model_leaves, first, self.flops
            )
        self.initial_values = _initial_values(self.model, assembled, self.seed)

    def certify(self, say: Callable[[str], None]) -> Certificate:
        plan, matmul = self.plan, self.plan.matmul
        precision = jax.default_matmul_precision(None if matmul == "default" else matmul)
        # Steps are compiled in another thread, while this one runs other programs.
        with precision, ThreadPoolExecutor(max_workers=1) as threads:
            step, batch = self.assembled.step, self.assembled.put_batch(self.leaves[0])
            step.compile_ahead(step.abstract_state, batch, threads)
            with _phase("float64: one device", say):
                expected = self.reference_in_float64()
            _check_finite(expected)
            train_in_float64 = self.mesh_in_float64(expected.withheld, threads)
            with _phase(f"precision {plan.precision}: the mesh", say):
                own_precision, lost = self.own_precision()
            with _phase("float64: the mesh", say):
                actual = train_in_float64()
            nulls = null_leaves(expected.gradients)
            float64 = self.compare_in_float64(expected, actual, nulls)
            with _phase("as written: one device", say):
                as_written, unwritten = self.as_written()
        return Certificate(
            equal=all(c.equal for c in (*float64, *own_precision, *as_written)),
            mesh=plan.mesh,
            plan=plan.model_dump(mode="json"),
            steps=len(self.batches),
            parameters=sum(value.size for value in expected.parameters.values()),
            float64=float64,
            null_leaves=nulls,
            null_parts=null_parts(expected.gradients),
            own_precision=own_precision,
            as_written=as_written,
            not_compared=[*lost, *unwritten],
            kernels=self.assembled.kernels,
            warnings=list(self.assembled.remarks),
            versions={n: v for n, v in package_versions().items() if n in _PACKAGES},
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def reference_in_float64(self) -> ObservedRun:
        with jax.enable_x64(True):
            return self.wide.run(self.wide_values, self.leaves, self.update, self.clip_norm)

    def mesh_in_float64(self, withheld: Masks, threads: Executor) -> Callable[[], ObservedRun]:
        """Start to compile the step in float64, and return what trains with it."""
        masks = masks_of_step(withheld, self.assembled.traced.layout)
        recording = recording_gradients(self.optimizer, masks)
        wide = self.assembled.with_optimizer(recording, wide=True)
        with jax.enable_x64(True):
            batch = wide.put_batch(self.leaves[0])
            wide.step.compile_ahead(wide.abstract_start(self.wide_values), batch, threads)

        def train() -> ObservedRun:
            with jax.enable_x64(True):
                state = wide.start(self.wide_values)
                return train_on_mesh(wide, state, self.leaves, self.clip_norm)

        return train

    def compare_in_float64(
        self, expected: ObservedRun, actual: ObservedRun, nulls: Sequence[str]
    ) -> list[Comparison]:
        """Compare the two runs; if they differ, measure how much rounding changes in float64."""

        def gaps(actual: ObservedRun) -> dict[str, Gaps]:
            return {
                "loss": loss_gaps(expected.losses, actual.losses),
                "metrics": metric_gaps(expected.metrics, actual.metrics),
                "gradients": exact_gaps(expected.gradients, actual.gradients, nulls=nulls),
                "parameters": exact_gaps(expected.parameters, actual.parameters, nulls=nulls),
                "state": exact_gaps(*where_defined(expected.state, actual.state)),
            }

        @functools.cache
        def amplified() -> dict[str, Gaps]:
            with jax.enable_x64(True):
                values = perturbed(self.initial_values, FLOAT64_UNIT, seed=0)
                batches = [
                    perturbed(batch, FLOAT64_UNIT, seed)
                    for seed, batch in enumerate(self.leaves, start=1)
                ]
                run = self.wide.run(values, batches, self.update, self.clip_norm, expected.withheld)
            growth = self.rounding(self.traced).gradients / FLOAT32_UNIT
            return {
                what: {path: growth * gap for path, gap in found.items()}
                for what, found in gaps(run).items()
            }

        return [
            judge(
                what,
                found,
                FLOAT64_TOLERANCE,
                how=HOW_FLOAT64,
                allowed=lambda what=what: amplified()[what],
            )
            for what, found in gaps(actual).items()
            if found
        ]

    def own_precision(self) -> tuple[list[Comparison], list[str]]:
        """Compare initial values, and every step, as the plan computes; return what is left out."""
        state = self.assembled.init(self.seed, quickly=True)
        steps = list(steps_on_mesh(self.assembled, state, self.leaves, self.clip_norm))
        paths = [leaf.path for leaf in self.traced.leaves]
        on_one_device = fetch(dict(zip(paths, self.initial_values, strict=True)))
        initial = judge(
            "initial values",
            exact_gaps(on_one_device, steps[0].before),
            INITIAL_TOLERANCE,
            how="the mesh against one device, relative to each leaf's largest value",
        )
        # Without a cast in the plan, the loss as written has the plan's own precision.
        plain = self.plain if self.assembled.plan.precision == "no" else None
        own = OwnPrecision(
            plain or self.traced_reference(self.traced, wide=False),
            self.wide,
            self.update,
            self.rounding(self.traced),
            self.initial_values,
        )
        comparisons, left_out = own.compare(steps, self.leaves)
        return [initial, *comparisons], left_out

    def as_written(self) -> tuple[list[Comparison], list[str]]:
        """Compare with the loss as its author wrote it; also return what is left out, and why."""
        if self.plain is None:
            return [], [NOT_WRITTEN]
        traced, wide = self.traced_in_float32, self.wide
        if random_draws(traced.closed) != random_draws(self.traced.closed):
            # A draw in the format of an activation gives other numbers in half precision.
            wide = self.traced_reference(traced, wide=True)
        values, batch = self.initial_values, self.leaves[0]
        with jax.enable_x64(True):
            exact = wide.first_step(self.wide_values, batch)
        actual = self.plain.first_step(values, batch)
        if not actual.is_finite():
            return [], [WRITTEN_NOT_FINITE]

        def in_float32() -> ObservedRun:
            return self.traced_reference(traced, wide=False).first_step(values, batch)

        step = ComparedStep(values, batch, exact, actual, wide, in_float32)
        return compare_steps([step], self.rounding(traced, casts=True), HOW_WRITTEN), []

    def rounding(self, traced: TracedLoss, *, casts: bool = False) -> Rounding:
        platform = self.assembled.mesh.devices.flat[0].platform
        return rounding_of(
            traced, matmul=self.assembled.plan.matmul, platform=platform, casts=casts
        )

    @cached_property
    def wide(self) -> Reference:
        return self.traced_reference(self.traced, wide=True)

    @cached_property
    def plain(self) -> Reference | None:
        """The reference of the loss as its author wrote it."""
        return None if self.written is None else self.reference(self.written)

    @cached_property
    def wide_values(self) -> list[Any]:
        return widened(self.initial_values)

    @cached_property
    def update(self) -> OptaxUpdate:
        return OptaxUpdate(self.optimizer)

    @cached_property
    def leaves(self) -> list[list[Any]]:
        return [jax.tree.leaves(batch) for batch in self.batches]

    def traced_reference(self, traced: TracedLoss, *, wide: bool) -> Reference:
        return self.reference(traced_gradient(traced, wide=wide, flops=self.flops))

    def reference(self, gradient: Gradient) -> Reference:
        count = self.assembled.plan.batch.gradient_accumulation_steps
        return Reference(gradient, self.traced.leaves, count)


def _trace(loss: Loss, assembled: Assembled, batch: Batch, precision: Precision) -> TracedLoss:
    micro = divide_batch(batch, assembled.plan.batch.gradient_accumulation_steps)
    return trace_loss(loss, assembled.model_leaves, micro, COMPUTE_DTYPES[precision])


def _initial_values(model: ModelSource, assembled: Assembled, seed: int) -> list[Any]:
    """Return the model's initial leaf values, created in its own precision on one device."""
    values = initial_values(model, assembled.model_leaves, seed, compiler_options=quick_options())
    # From the host they go to one device or to many without a compiled program.
    return [v if is_key(v) else np.asarray(v) for v in values]


@contextmanager
def _phase(name: str, say: Callable[[str], None]) -> Generator[None]:
    say(name)
    with activity(name):
        yield


def _check_finite(run: ObservedRun) -> None:
    """Refuse a reference that is not finite."""
    found = [(loss, float(m[GRAD_NORM])) for loss, m in zip(run.losses, run.metrics, strict=True)]
    before = next((n for n, both in enumerate(found) if not np.isfinite(both).all()), None)
    if before is None:
        return
    loss, norm = found[before]
    what = f"gradient of {{}} is {norm}" if np.isfinite(loss) else f"loss of {{}} is {loss}"
    which = f"step {before + 1}" if before else "the first batch"
    raise UserError(
        f"the {what.format(which)} on one device, in float64",
        why="the model, the loss or the data has a value that is not finite, so there is nothing "
        "to compare with",
        fix="check the data, and the loss of one sample"
        + (f"; or compare the steps before it alone: steps={before}" if before else ""),
    )
