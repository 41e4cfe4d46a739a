"""Running the proof: one device and the mesh, in float64 and in the plan's own precision."""

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

from meshwright.data.batches import read_batch
from meshwright.errors import UserError
from meshwright.plan import Plan
from meshwright.processes import process_count
from meshwright.program.evaluate.widen import is_narrow
from meshwright.program.trace.model_leaves import build_unplaced
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, TracedLoss, trace_loss
from meshwright.proof.certificate import Certificate, Comparison
from meshwright.proof.compare import (
    compare_exactly,
    compare_losses,
    compare_roughly,
    null_leaves,
)
from meshwright.proof.mesh_run import canonical_values, noting, train_on_mesh
from meshwright.proof.observed import Observed, fetch
from meshwright.proof.reference import Evaluate, Reference, traced_loss, written_loss
from meshwright.proof.rounding import (
    computes_in_half,
    draws_of,
    gradient_rounding,
    rounding_tolerance,
)
from meshwright.step.assemble import Assembled, ModelSource, assemble
from meshwright.trees import divide_batch, is_key

FLOAT64_TOLERANCE = 1e-10

INITIAL_TOLERANCE = 1e-5
"""Of float32 values that are drawn alike everywhere; what is computed from them may be rounded
differently, as by the decomposition behind an orthogonal matrix."""


def verify(
    model: ModelSource,
    loss: Loss,
    plan: Plan,
    batches: Callable[[int], Any],
    *,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 5,
    clip_norm: float | None = None,
    seed: int = 0,
    trainable: Any = nnx.Param,
    devices: Sequence[Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Compare training under a plan with training on one device.

    Args:
        model: builds the model from `nnx.Rngs`.
        loss: ``loss(model, batch)``.
        plan: what to prove.
        batches: the global batch of each update, by its number.
        optimizer: AdamW unless given.
        steps: updates to compare in float64.
        clip_norm: largest global gradient norm.
        seed: of the model.
        trainable: NNX filter for what is trained.
        devices: of the mesh; all devices by default.
        say: told what is being done.
    """
    _check_alone()
    # JAX's 64-bit mode would change what a model is; only the evaluation is widened.
    with jax.enable_x64(False):
        read = [read_batch(batches(n)) for n in range(steps)]
        optimizer = optimizer or optax.adamw(1e-3)
        make = functools.partial(
            assemble,
            model,
            loss,
            plan=plan,
            batch=read[0],
            clip_norm=clip_norm,
            trainable=trainable,
            devices=devices,
        )
        own = make(optimizer=noting(optimizer))
        traced = _trace(loss, own, read[0], plan.precision)
        proof = _Proof(
            own=own,
            widen=lambda noted: make(optimizer=noted, wide=True),
            loss=loss,
            traced=traced,
            plain=traced if plan.precision == "no" else _trace(loss, own, read[0], "no"),
            values=_create(model, own, seed),
            batches=read,
            optimizer=optimizer,
            clip_norm=clip_norm,
            seed=seed,
        )
        with jax.default_matmul_precision(None if plan.matmul == "default" else plan.matmul):
            return proof.certify(say)


def _check_alone() -> None:
    if process_count() > 1:
        raise UserError(
            f"verify cannot run in {process_count()} processes",
            why="it compares the devices of a mesh with one of them, number by number",
            fix="run it in one process, with as many simulated devices: simulate=8 (or "
            "mw.simulate_devices(8))",
        )


@dataclass(frozen=True)
class _Proof:
    """What a proof works with.

    Attributes:
        own: the step in the plan's own precision.
        widen: makes the same step in float64, with another optimizer.
        loss: as its author wrote it.
        traced: the loss traced for one microbatch, before any pass.
        plain: the same in the formats its author wrote.
        values: the model's first leaf values, created on one device.
        batches: the global batch of every update.
        optimizer: as the user gave it.
        clip_norm: largest global gradient norm.
        seed: of the model.
    """

    own: Assembled
    widen: Callable[[optax.GradientTransformation], Assembled]
    loss: Loss
    traced: TracedLoss
    plain: TracedLoss
    values: list[Any]
    batches: list[Any]
    optimizer: optax.GradientTransformation
    clip_norm: float | None
    seed: int

    def certify(self, say: Callable[[str], None]) -> Certificate:
        plan = self.own.plan
        say("float64: one device")
        expected = self.reference_in_float64()
        _check_finite(expected.losses[0])
        say("float64: the mesh")
        found = self.mesh_in_float64(expected.withheld)
        nulls = null_leaves(expected.gradients)
        float64 = _compare_in_float64(expected, found, nulls)
        say(f"precision {plan.precision}: the mesh")
        own = self.own_precision(expected)
        say("as written: one device")
        written = self.as_written(expected)
        return Certificate(
            equal=all(c.equal for c in (*float64, *own, *written)),
            mesh=plan.mesh,
            plan=plan.model_dump(mode="json"),
            steps=len(self.batches),
            parameters=sum(value.size for value in expected.parameters.values()),
            float64=float64,
            null_leaves=nulls,
            own_precision=own,
            as_written=written,
            versions={name: version(name) for name in ("meshwright", "jax", "flax", "optax")},
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def reference_in_float64(self) -> Observed:
        with jax.enable_x64(True):
            reference = self.reference(traced_loss(self.traced, wide=True))
            values = _widened(self.values)
            groups = [paths for _, paths in self.step_leaves()]
            return reference.run(values, self.leaves(), self.optimizer, self.clip_norm, groups)

    def mesh_in_float64(self, withheld: frozenset[str]) -> Observed:
        stacks = [path for path, leaves in self.step_leaves() if withheld.issuperset(leaves)]
        wide = self.widen(noting(self.optimizer, withheld.union(stacks)))
        with jax.enable_x64(True):
            state = wide.start(_widened(self.values))
            return train_on_mesh(wide, state, self.leaves(), self.clip_norm)

    def step_leaves(self) -> list[tuple[str, list[str]]]:
        """Return the path of each leaf the step trains and the paths of those it stands for."""
        layout = self.own.traced.layout
        return [
            (step.leaf.path, [layout.leaves[source].path for source in step.sources])
            for step in layout.select("param")
        ]

    def own_precision(self, exact: Observed) -> list[Comparison]:
        """Compare initial values, loss and gradients of the first update in the plan's format."""
        state = self.own.init(self.seed)
        born = canonical_values(self.own, state)
        found = train_on_mesh(self.own, state, self.leaves()[:1], self.clip_norm)
        paths = [leaf.path for leaf in self.traced.leaves]
        alone = fetch(dict(zip(paths, self.values, strict=True)))
        initial = compare_exactly("initial values", alone, born, INITIAL_TOLERANCE)
        if not computes_in_half(self.traced.closed):
            return [initial, *self.compare_first(exact, found, exact, self.traced)]
        # So coarse that one device, which rounds much the same, is nearer than exact values.
        evaluate = traced_loss(self.traced, wide=False)
        reference = self.reference(evaluate, loss_scale=found.loss_scale)
        rounded = reference.first_update(self.values, self.leaves()[0])
        return [initial, *self.compare_first(rounded, found, exact, self.traced)]

    def as_written(self, exact: Observed) -> list[Comparison]:
        """Compare the reference with the loss as its author wrote it, which nothing has traced."""
        reference = self.reference(written_loss(self.loss, self.own.model_leaves, self.batches[0]))
        found = reference.first_update(self.values, self.leaves()[0])
        if draws_of(self.plain.closed) == draws_of(self.traced.closed):
            return self.compare_first(exact, found, exact, self.traced)
        # Noise in the format of an activation: in half precision other numbers are drawn.
        with jax.enable_x64(True):
            reference = self.reference(traced_loss(self.plain, wide=True))
            exact = reference.first_update(_widened(self.values), self.leaves()[0])
        return self.compare_first(exact, found, exact, self.plain)

    def compare_first(
        self, expected: Observed, found: Observed, exact: Observed, traced: TracedLoss
    ) -> list[Comparison]:
        """Compare loss and gradients of the first update, as closely as rounding allows."""
        tolerance = rounding_tolerance(
            traced.closed,
            matmul=self.own.plan.matmul,
            platform=self.own.mesh.devices.flat[0].platform,
        )
        trained = [leaf.dtype for leaf in traced.leaves if leaf.role == "param"]
        return [
            compare_losses(expected.losses[:1], found.losses, tolerance),
            compare_roughly(
                "gradients",
                expected.gradients,
                found.gradients,
                tolerance + gradient_rounding(trained),
                nulls=null_leaves(exact.gradients),
                exact=exact.gradients,
            ),
        ]

    def reference(self, evaluate: Evaluate, *, loss_scale: float = 1.0) -> Reference:
        count = self.own.plan.batch.gradient_accumulation_steps
        return Reference(evaluate, self.traced.leaves, microbatches=count, loss_scale=loss_scale)

    def leaves(self) -> list[list[Any]]:
        return [jax.tree.leaves(batch) for batch in self.batches]


def _trace(loss: Loss, assembled: Assembled, batch: Any, precision: str) -> TracedLoss:
    count = assembled.plan.batch.gradient_accumulation_steps
    micro = divide_batch(batch, count)
    return trace_loss(loss, assembled.model_leaves, micro, COMPUTE_DTYPES[precision])


def _create(model: ModelSource, assembled: Assembled, seed: int) -> list[Any]:
    """Return the model's first leaf values, created in its own precision on one device."""

    def create() -> list[Any]:
        return assembled.model_leaves.values(build_unplaced(lambda: model(nnx.Rngs(seed))))

    # On the host, from where they go to one device and to many without a program of their own.
    return [v if is_key(v) else np.asarray(v) for v in jax.jit(create)()]


def _widened(values: Sequence[Any]) -> list[Any]:
    return [v.astype(np.promote_types(v.dtype, np.float64)) if is_narrow(v) else v for v in values]


def _check_finite(loss: float) -> None:
    if not np.isfinite(loss):
        raise UserError(
            f"the loss of the first batch is {loss} on one device, in float64",
            why="the model, the loss or the data holds a value that is not finite, so there is "
            "nothing to compare the mesh with",
            fix="check the data and the loss on one sample",
        )


def _compare_in_float64(
    expected: Observed, found: Observed, nulls: Sequence[str]
) -> list[Comparison]:
    compare = functools.partial(compare_exactly, tolerance=FLOAT64_TOLERANCE)
    comparisons = [
        compare_losses(expected.losses, found.losses, FLOAT64_TOLERANCE),
        compare("gradients", expected.gradients, found.gradients, nulls=nulls),
        compare("parameters", expected.parameters, found.parameters, nulls=nulls),
    ]
    if expected.state:
        comparisons.append(compare("state", expected.state, found.state))
    return comparisons
