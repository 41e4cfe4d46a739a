"""Which equation and which samples a step that was not finite comes from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.evaluate.nonfinite_origin import Origin, find_origins
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, LossValue, TracedLoss, trace_loss
from meshwright.step.assemble import Assembled
from meshwright.step.gradients import value_and_grad
from meshwright.trainer.incidents.flight_record import FlightRecord

Scale = Sequence[Any] | None
"""The loss scale, good steps and skipped steps of fp16."""


@dataclass(frozen=True)
class Responsible:
    """The samples with which alone a step is not finite, and whether the others together are."""

    samples: tuple[int, ...]
    finite_without: bool | None


def first_origin(
    loss: Loss, assembled: Assembled, values: Sequence[Any], read: FlightRecord, scale: Scale
) -> Origin | None:
    """Evaluate loss and gradients equation by equation; return where they stop being finite.

    Microbatches are evaluated one after another, up to the first that is not finite.
    """
    count = assembled.plan.batch.gradient_accumulation_steps
    for number in range(count):
        batch = read.rows(slice(number, None, count))
        traced = _trace(loss, assembled, batch)
        leaves = jax.tree.leaves(batch)
        params, others = _by_role(traced, values)
        kinds = ["parameter" if leaf.role == "param" else "state" for leaf in traced.leaves]
        named = [f"{kind} {leaf.path}" for kind, leaf in zip(kinds, traced.leaves, strict=True)]
        arrays = [f"batch array {name}" for name in read.names]
        names = [*chain(*_by_role(traced, named)), *arrays]
        inputs = [jnp.asarray(each) for each in (*params, *others, *leaves)]
        program = jax.make_jaxpr(_loss(traced))(params, others, leaves)
        found, noted = find_origins(program, inputs, names)
        if not found:
            program = jax.make_jaxpr(_loss_and_gradients(traced, scale))(params, others, leaves)
            forward = {origin.place for origin in noted}
            found, _ = find_origins(program, inputs, names, forward)
        if found:
            return min(found, key=lambda origin: origin.first.order)
    return None


def find_responsible(
    loss: Loss, assembled: Assembled, values: Sequence[Any], read: FlightRecord, scale: Scale
) -> Responsible | None:
    """Run every sample alone, then all others; None if the loss takes no single sample."""
    size = len(read.leaves[0])
    try:
        alone = _finite_check(loss, assembled, read.rows(slice(0, 1)), scale)
        bad = [row for row in range(size) if not alone(values, read.rows(slice(row, row + 1)))]
        others = np.setdiff1d(np.arange(size), bad)
        if not bad or not len(others):
            return Responsible(tuple(map(read.sample, bad)), None)
        rest = read.rows(others)
        finite = _finite_check(loss, assembled, rest, scale)(values, rest)
    except (TypeError, ValueError):
        # A model may need a batch of its own size.
        return None
    return Responsible(tuple(map(read.sample, bad)), finite)


def _finite_check(
    loss: Loss, assembled: Assembled, like: Any, scale: Scale
) -> Callable[[Sequence[Any], Any], bool]:
    traced = _trace(loss, assembled, like)
    run = _loss_and_gradients(traced, scale)

    @jax.jit
    def finite(params: list[Any], others: list[Any], leaves: list[Any]) -> Any:
        value, gradients = run(params, others, leaves)
        return jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(gradients))

    return lambda values, batch: bool(finite(*_by_role(traced, values), jax.tree.leaves(batch)))


def _trace(loss: Loss, assembled: Assembled, batch: Any) -> TracedLoss:
    return trace_loss(loss, assembled.model_leaves, batch, COMPUTE_DTYPES[assembled.plan.precision])


def _loss_and_gradients(
    traced: TracedLoss, scale: Scale
) -> Callable[[list[Any], list[Any], list[Any]], tuple[Any, list[Any]]]:
    """Return the loss and its gradients as the program was traced, without a mesh."""
    factor = None if scale is None else jnp.asarray(scale[0])

    def run(params: list[Any], others: list[Any], batch: list[Any]) -> tuple[Any, list[Any]]:
        (_, found), gradients = value_and_grad(_value(traced))(params, others, batch, factor)
        return found.objective.mean, gradients

    return run


def _loss(traced: TracedLoss) -> Callable[..., Any]:
    value = _value(traced)
    return lambda params, others, batch: value(params, others, batch).objective.mean


def _value(traced: TracedLoss) -> Callable[..., LossValue]:
    """Return the value of the loss as a function of parameters, other leaves and the batch."""
    numbers = [n for n, leaf in enumerate(traced.leaves) if leaf.role == "param"]

    def value(params: Sequence[Any], others: Sequence[Any], batch: Sequence[Any]) -> LossValue:
        rest, trained = iter(others), iter(params)
        leaves = [next(trained) if n in numbers else next(rest) for n in range(len(traced.leaves))]
        return traced.read_outputs(Evaluator().run(traced.closed, [*leaves, *batch]))

    return value


def _by_role(traced: TracedLoss, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(traced.leaves, values, strict=True))
    return [v for leaf, v in pairs if leaf.role == "param"], [
        v for leaf, v in pairs if leaf.role != "param"
    ]
