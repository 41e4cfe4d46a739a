"""Running the proof: one device and the mesh, in float64 and in the plan's own precision."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshwright.plan import Plan
from meshwright.program.jaxprs import Jaxpr, aval_of
from meshwright.program.policy import COMPUTE_DTYPES
from meshwright.program.trace import Loss, TracedLoss, trace_loss
from meshwright.program.widen import widen
from meshwright.step.assemble import Assembled, ModelSource, assemble
from meshwright.verify.certificate import Certificate, Comparison
from meshwright.verify.compare import (
    compare_exactly,
    compare_losses,
    compare_roughly,
    null_leaves,
)
from meshwright.verify.reference import Observed, Reference

FLOAT64_TOLERANCE = 1e-10


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
    proof = _Proof(
        model=model,
        loss=loss,
        plan=plan,
        batches=[jax.tree.leaves(batches(n)) for n in range(steps)],
        optimizer=optimizer or optax.adamw(1e-3),
        clip_norm=clip_norm,
        seed=seed,
        trainable=trainable,
        devices=devices,
        example=batches(0),
    )
    say("float64: one device")
    with jax.enable_x64(True):
        expected = proof.reference(wide=True)
        say("float64: the mesh")
        found = proof.on_mesh(wide=True)
    nulls = null_leaves(expected.gradients)
    float64 = [
        compare_losses(expected.losses, found.losses, FLOAT64_TOLERANCE),
        compare_exactly("gradients", expected.gradients, found.gradients, nulls, FLOAT64_TOLERANCE),
        compare_exactly(
            "parameters", expected.parameters, found.parameters, nulls, FLOAT64_TOLERANCE
        ),
    ]
    say(f"precision {plan.precision}: one device and the mesh")
    own = proof.own_precision()
    return Certificate(
        equal=all(c.equal for c in (*float64, *own)),
        mesh=plan.mesh,
        plan=plan.model_dump(mode="json"),
        steps=steps,
        parameters=sum(value.size for value in expected.parameters.values()),
        float64=float64,
        null_leaves=nulls,
        own_precision=own,
        versions={name: version(name) for name in ("meshwright", "jax", "flax", "optax")},
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


@dataclass(frozen=True)
class _Proof:
    model: ModelSource
    loss: Loss
    plan: Plan
    batches: list[list[Any]]
    optimizer: optax.GradientTransformation
    clip_norm: float | None
    seed: int
    trainable: Any
    devices: Sequence[Any] | None
    example: Any

    def assembled(self, *, wide: bool) -> Assembled:
        # Traced as it will train; only the evaluation of the program is widened.
        with jax.enable_x64(False):
            return assemble(
                self.model,
                self.loss,
                self.optimizer,
                self.plan,
                self.example,
                clip_norm=self.clip_norm,
                trainable=self.trainable,
                devices=self.devices,
                wide=wide,
            )

    def leaves(self, assembled: Assembled) -> list[Any]:
        """Return the model's first values, created in its own precision on one device."""
        with jax.enable_x64(False):
            return jax.jit(lambda: assembled.parts.values(self.model(nnx.Rngs(self.seed))))()

    def traced(self, assembled: Assembled) -> TracedLoss:
        count = self.plan.batch.gradient_accumulation_steps
        micro = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((a.shape[0] // count, *a.shape[1:]), a.dtype),
            self.example,
        )
        with jax.enable_x64(False):
            dtype = COMPUTE_DTYPES[self.plan.precision]
            return trace_loss(self.loss, assembled.parts, micro, dtype)

    def reference(self, *, wide: bool, steps: int | None = None) -> Observed:
        assembled = self.assembled(wide=wide)
        reference = Reference(
            self.traced(assembled),
            microbatches=self.plan.batch.gradient_accumulation_steps,
            optimizer=self.optimizer,
            clip_norm=self.clip_norm,
            wide=wide,
        )
        return reference.run(self.leaves(assembled), self.batches[:steps])

    def on_mesh(self, *, wide: bool, steps: int | None = None) -> Observed:
        assembled = self.assembled(wide=wide)
        values = [widen(v) if wide else v for v in self.leaves(assembled)]
        state = assembled.start(values)
        first = assembled.put_batch(self.batches[0])
        gradients = jax.jit(lambda s, b: assembled.step.gradients(s, b).values)(state, first)
        by_path = assembled.canonical_params(gradients)
        losses: list[float] = []
        for batch in self.batches[:steps]:
            state, metrics = assembled.step(state, assembled.put_batch(batch))
            losses.append(float(metrics["loss"]))
        return Observed(losses, _fetch(by_path), _fetch(assembled.canonical_params(state.params)))

    def own_precision(self) -> list[Comparison]:
        """Compare loss and gradients of the first update in the plan's own number format."""
        expected = self.reference(wide=False, steps=1)
        found = self.on_mesh(wide=False, steps=1)
        tolerance = _rounding_tolerance(self.plan, self.traced(self.assembled(wide=False)))
        return [
            compare_losses(expected.losses, found.losses, tolerance),
            compare_roughly("gradients", expected.gradients, found.gradients, tolerance),
        ]


def _fetch(values: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {path: np.asarray(value) for path, value in jax.device_get(values).items()}


def _rounding_tolerance(plan: Plan, traced: TracedLoss) -> float:
    """Return how far two orders of summation may lie apart.

    Every matrix product of the program rounds its result to the compute format once, forward and
    twice backward; independent roundings add like a random walk. Sums over n terms in float32 add
    √n roundings of their own.
    """
    dtype = COMPUTE_DTYPES[plan.precision] or jnp.float32
    products, terms = _count_products(traced.closed.jaxpr)
    rounding = float(jnp.finfo(dtype).eps)
    summing = float(jnp.finfo(jnp.float32).eps)
    return 4 * (rounding * math.sqrt(3 * max(products, 1)) + summing * math.sqrt(terms))


def _count_products(jaxpr: Jaxpr, times: int = 1) -> tuple[int, int]:
    """Return how many products the program has, and the most terms one of their gradients sums."""
    products, terms = 0, 1
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            columns = max(aval_of(eqn.invars[1]).shape[-1], 1)
            products += times
            terms = max(terms, math.prod(aval_of(eqn.outvars[0]).shape) // columns)
        if eqn.primitive.name == "scan":
            inner = eqn.params["jaxpr"].jaxpr
            more, longest = _count_products(inner, times * eqn.params["length"])
            products, terms = products + more, max(terms, longest)
    return products, terms
