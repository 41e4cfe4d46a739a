"""`verify`: training on one device and on the mesh, in float64 and in the plan's precision."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.config.schema import Precision
from meshwright.data.batches import read_batch
from meshwright.errors import UserError
from meshwright.mesh.build import Device
from meshwright.plan import Plan
from meshwright.processes import process_count
from meshwright.program.evaluate.widen import is_narrow
from meshwright.program.trace.build_model import ModelSource, initialize
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, TracedLoss, trace_loss
from meshwright.proof.certificate import Certificate, Comparison
from meshwright.proof.compare import (
    compare_exactly,
    compare_losses,
    compare_roughly,
    null_leaves,
)
from meshwright.proof.mesh_run import canonical_values, recording_gradients, train_on_mesh
from meshwright.proof.observed import ObservedRun, fetch
from meshwright.proof.reference import Evaluate, Reference, traced_loss, written_loss
from meshwright.proof.rounding import (
    computes_in_half,
    gradient_rounding,
    random_draws,
    rounding_tolerance,
)
from meshwright.step.assemble import Assembled, assemble
from meshwright.trees import Batch, divide_batch, is_key

FLOAT64_TOLERANCE = 1e-10

INITIAL_TOLERANCE = 1e-5
"""For float32 values. The same random numbers are drawn everywhere, but what is computed from them
may be rounded differently, such as the decomposition behind an orthogonal matrix."""


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
    trainable: Filter = nnx.Param,
    devices: Sequence[Device] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Compare training under a plan with training on one device.

    Args:
        model: builds the model from `nnx.Rngs`.
        loss: ``loss(model, batch)``.
        plan: the plan to verify.
        batches: returns the global batch of an update, given its number.
        optimizer: any optax transformation; AdamW by default.
        steps: updates to compare in float64.
        clip_norm: largest global gradient norm.
        seed: seed of the initialization.
        trainable: NNX filter of what is trained.
        devices: devices of the mesh; all by default.
        say: called with the name of each phase when it starts.
    """
    _check_single_process()
    # In 64-bit mode the model itself would differ; only the evaluation is widened.
    with jax.enable_x64(False):
        global_batches = [read_batch(batches(n)) for n in range(steps)]
        optimizer = optimizer or optax.adamw(1e-3)
        make = functools.partial(
            assemble,
            model,
            loss,
            plan=plan,
            batch=global_batches[0],
            clip_norm=clip_norm,
            trainable=trainable,
            devices=devices,
        )
        assembled = make(optimizer=recording_gradients(optimizer))
        traced = _trace(loss, assembled, global_batches[0], plan.precision)
        return _Proof(
            assembled=assembled,
            assemble_wide=lambda optimizer: make(optimizer=optimizer, wide=True),
            loss=loss,
            traced=traced,
            traced_in_float32=traced
            if plan.precision == "no"
            else _trace(loss, assembled, global_batches[0], "no"),
            initial_values=_initial_values(model, assembled, seed),
            batches=global_batches,
            optimizer=optimizer,
            clip_norm=clip_norm,
            seed=seed,
        ).certify(say)


def _check_single_process() -> None:
    if process_count() > 1:
        raise UserError(
            f"verify cannot run in {process_count()} processes",
            why="it compares the devices of a mesh with one of them, number by number",
            fix="run it in one process with simulated devices: simulate=8 (or "
            "mw.simulate_devices(8))",
        )


@dataclass(frozen=True)
class _Proof:
    """The inputs of a comparison, and its parts.

    Attributes:
        assembled: the step in the plan's precision.
        assemble_wide: assembles the same step in float64 with another optimizer.
        loss: the loss as its author wrote it.
        traced: the loss traced for one microbatch, before any pass.
        traced_in_float32: the same without the plan's half precision.
        initial_values: the model's initial leaf values, created on one device.
        batches: the global batch of every update.
        optimizer: the user's optimizer.
        clip_norm: largest global gradient norm.
        seed: seed of the initialization.
    """

    assembled: Assembled
    assemble_wide: Callable[[optax.GradientTransformation], Assembled]
    loss: Loss
    traced: TracedLoss
    traced_in_float32: TracedLoss
    initial_values: list[Any]
    batches: list[Batch]
    optimizer: optax.GradientTransformation
    clip_norm: float | None
    seed: int

    def certify(self, say: Callable[[str], None]) -> Certificate:
        matmul = self.assembled.plan.matmul
        with jax.default_matmul_precision(None if matmul == "default" else matmul):
            return self._certify(say)

    def _certify(self, say: Callable[[str], None]) -> Certificate:
        plan = self.assembled.plan
        say("float64: one device")
        expected = self.reference_in_float64()
        _check_finite(expected.losses[0])
        say("float64: the mesh")
        actual = self.mesh_in_float64(expected.withheld)
        nulls = null_leaves(expected.gradients)
        float64 = _compare_in_float64(expected, actual, nulls)
        say(f"precision {plan.precision}: the mesh")
        own_precision = self.own_precision(expected)
        say("as written: one device")
        as_written = self.as_written(expected)
        return Certificate(
            equal=all(c.equal for c in (*float64, *own_precision, *as_written)),
            mesh=plan.mesh,
            plan=plan.model_dump(mode="json"),
            steps=len(self.batches),
            parameters=sum(value.size for value in expected.parameters.values()),
            float64=float64,
            null_leaves=nulls,
            own_precision=own_precision,
            as_written=as_written,
            warnings=list(self.assembled.remarks),
            versions={name: version(name) for name in ("meshwright", "jax", "flax", "optax")},
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def reference_in_float64(self) -> ObservedRun:
        with jax.enable_x64(True):
            reference = self.reference(traced_loss(self.traced, wide=True))
            values = _widened(self.initial_values)
            groups = [paths for _, paths in self.step_leaves()]
            return reference.run(values, self.leaves(), self.optimizer, self.clip_norm, groups)

    def mesh_in_float64(self, withheld: frozenset[str]) -> ObservedRun:
        stacks = [path for path, leaves in self.step_leaves() if withheld.issuperset(leaves)]
        wide = self.assemble_wide(recording_gradients(self.optimizer, withheld.union(stacks)))
        with jax.enable_x64(True):
            state = wide.start(_widened(self.initial_values))
            return train_on_mesh(wide, state, self.leaves(), self.clip_norm)

    def step_leaves(self) -> list[tuple[str, list[str]]]:
        """Return the path of each trained leaf of the step and the model's paths it combines."""
        layout = self.assembled.traced.layout
        return [
            (step.leaf.path, [layout.leaves[source].path for source in step.sources])
            for step in layout.select("param")
        ]

    def own_precision(self, exact: ObservedRun) -> list[Comparison]:
        """Compare initial values, loss and gradients of the first update, as the plan computes."""
        state = self.assembled.init(self.seed)
        on_mesh = canonical_values(self.assembled, state)
        actual = train_on_mesh(self.assembled, state, self.leaves()[:1], self.clip_norm)
        paths = [leaf.path for leaf in self.traced.leaves]
        on_one_device = fetch(dict(zip(paths, self.initial_values, strict=True)))
        initial = compare_exactly("initial values", on_one_device, on_mesh, INITIAL_TOLERANCE)
        if not computes_in_half(self.traced.closed):
            return [initial, *self.compare_first(exact, actual, exact, self.traced)]
        # Half precision is coarse: one device, which rounds alike, is closer than exact values.
        evaluate = traced_loss(self.traced, wide=False)
        reference = self.reference(evaluate, loss_scale=actual.loss_scale)
        rounded = reference.first_update(self.initial_values, self.leaves()[0])
        return [initial, *self.compare_first(rounded, actual, exact, self.traced)]

    def as_written(self, exact: ObservedRun) -> list[Comparison]:
        """Compare the reference with the loss as its author wrote it, called without tracing."""
        reference = self.reference(
            written_loss(self.loss, self.assembled.model_leaves, self.batches[0])
        )
        actual = reference.first_update(self.initial_values, self.leaves()[0])
        if random_draws(self.traced_in_float32.closed) == random_draws(self.traced.closed):
            return self.compare_first(exact, actual, exact, self.traced)
        # A draw in the format of an activation gives other numbers in half precision.
        with jax.enable_x64(True):
            reference = self.reference(traced_loss(self.traced_in_float32, wide=True))
            exact = reference.first_update(_widened(self.initial_values), self.leaves()[0])
        return self.compare_first(exact, actual, exact, self.traced_in_float32)

    def compare_first(
        self, expected: ObservedRun, actual: ObservedRun, exact: ObservedRun, traced: TracedLoss
    ) -> list[Comparison]:
        """Compare loss and gradients of the first update, as closely as rounding allows."""
        tolerance = rounding_tolerance(
            traced.closed,
            matmul=self.assembled.plan.matmul,
            platform=self.assembled.mesh.devices.flat[0].platform,
        )
        trained = [leaf.dtype for leaf in traced.leaves if leaf.role == "param"]
        return [
            compare_losses(expected.losses[:1], actual.losses, tolerance),
            compare_roughly(
                "gradients",
                expected.gradients,
                actual.gradients,
                tolerance + gradient_rounding(trained),
                nulls=null_leaves(exact.gradients),
                exact=exact.gradients,
            ),
        ]

    def reference(self, evaluate: Evaluate, *, loss_scale: float = 1.0) -> Reference:
        count = self.assembled.plan.batch.gradient_accumulation_steps
        return Reference(evaluate, self.traced.leaves, microbatches=count, loss_scale=loss_scale)

    def leaves(self) -> list[list[Any]]:
        return [jax.tree.leaves(batch) for batch in self.batches]


def _trace(loss: Loss, assembled: Assembled, batch: Batch, precision: Precision) -> TracedLoss:
    count = assembled.plan.batch.gradient_accumulation_steps
    micro = divide_batch(batch, count)
    return trace_loss(loss, assembled.model_leaves, micro, COMPUTE_DTYPES[precision])


def _initial_values(model: ModelSource, assembled: Assembled, seed: int) -> list[Any]:
    """Return the model's initial leaf values, created in its own precision on one device."""
    values = initialize(model, assembled.model_leaves, seed, list, list)
    # From the host they go to one device or to many without a compiled program.
    return [v if is_key(v) else np.asarray(v) for v in values]


def _widened(values: Sequence[Any]) -> list[Any]:
    return [v.astype(np.promote_types(v.dtype, np.float64)) if is_narrow(v) else v for v in values]


def _check_finite(loss: float) -> None:
    if not np.isfinite(loss):
        raise UserError(
            f"the loss of the first batch is {loss} on one device, in float64",
            why="the model, the loss or the data has a value that is not finite, so there is "
            "nothing to compare with",
            fix="check the data, and the loss of one sample",
        )


def _compare_in_float64(
    expected: ObservedRun, actual: ObservedRun, nulls: Sequence[str]
) -> list[Comparison]:
    compare = functools.partial(compare_exactly, tolerance=FLOAT64_TOLERANCE)
    comparisons = [
        compare_losses(expected.losses, actual.losses, FLOAT64_TOLERANCE),
        compare("gradients", expected.gradients, actual.gradients, nulls=nulls),
        compare("parameters", expected.parameters, actual.parameters, nulls=nulls),
    ]
    if expected.state:
        comparisons.append(compare("state", expected.state, actual.state))
    return comparisons
