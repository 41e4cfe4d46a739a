"""The reference: training on one device by the shortest path, sharing no pass with the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.program.interpret import Interpreter
from meshwright.program.trace import TracedLoss
from meshwright.program.widen import Widening, widen


@dataclass(frozen=True)
class Observed:
    """What a training run showed.

    Attributes:
        losses: mean loss of every update.
        gradients: of the first update, by canonical path.
        parameters: after the last update, by canonical path.
    """

    losses: list[float]
    gradients: dict[str, np.ndarray[Any, Any]]
    parameters: dict[str, np.ndarray[Any, Any]]


class Reference:
    """One device, one microbatch after another, one optax update.

    Args:
        traced: the loss, traced for one microbatch on the model's own leaves.
        microbatches: how many a batch is divided into.
        optimizer: any optax transformation.
        clip_norm: largest global gradient norm.
        wide: compute in float64.
    """

    def __init__(
        self,
        traced: TracedLoss,
        *,
        microbatches: int,
        optimizer: optax.GradientTransformation,
        clip_norm: float | None,
        wide: bool,
    ) -> None:
        self._traced = traced
        self._count = microbatches
        self._optimizer = (
            optimizer
            if clip_norm is None
            else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
        )
        self._interpreter = Widening() if wide else Interpreter()
        self._wide = wide
        self._paths = [leaf.path for leaf in traced.leaves if leaf.role == "param"]
        self._gradient = jax.jit(self._loss_and_gradient)
        self._step = jax.jit(self._update)

    def run(self, leaves: Sequence[Any], batches: Sequence[Sequence[Any]]) -> Observed:
        """Train from these leaf values on these batches."""
        params, state = self._split([widen(v) if self._wide else v for v in leaves])
        optimizer = self._optimizer.init(params)
        losses: list[float] = []
        first: dict[str, Any] = {}
        for batch in batches:
            loss, gradients, state = self._batch_gradient(params, state, batch)
            losses.append(float(loss))
            first = first or jax.device_get(gradients)
            params, optimizer = self._step(params, optimizer, gradients)
        return Observed(losses, _numpy(first), _numpy(jax.device_get(params)))

    def _batch_gradient(
        self, params: dict[str, Any], state: list[Any], batch: Sequence[Any]
    ) -> tuple[Any, dict[str, Any], list[Any]]:
        totals: list[tuple[Any, Any]] = []
        sums: dict[str, Any] = {}
        for number in range(self._count):
            # Every count-th sample, written out: what the step calls a strided microbatch.
            micro = [np.asarray(leaf)[number :: self._count] for leaf in batch]
            (mean, (weight, state)), grads = self._gradient(params, state, micro)
            totals.append((mean * weight, weight))
            weighted = {path: g * weight for path, g in grads.items()}
            sums = {p: sums[p] + g for p, g in weighted.items()} if sums else weighted
        weight = sum(w for _, w in totals)
        return sum(t for t, _ in totals) / weight, {p: g / weight for p, g in sums.items()}, state

    def _loss_and_gradient(self, params: dict[str, Any], state: list[Any], batch: list[Any]) -> Any:
        def mean_loss(params: dict[str, Any]) -> Any:
            outputs = self._interpreter.run(self._traced.closed, self._join(params, state) + batch)
            value = self._traced.read_outputs(outputs)
            weight = jnp.where(value.objective.weight == 0, 1, value.objective.weight)
            return value.objective.total / weight, (weight, value.state)

        return jax.value_and_grad(mean_loss, has_aux=True)(params)

    def _update(self, params: Any, optimizer: Any, gradients: Any) -> Any:
        updates, optimizer = self._optimizer.update(gradients, optimizer, params)
        return optax.apply_updates(params, updates), optimizer

    def _split(self, values: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        leaves = self._traced.leaves
        params = {x.path: v for x, v in zip(leaves, values, strict=True) if x.role == "param"}
        return params, [v for x, v in zip(leaves, values, strict=True) if x.role == "state"]

    def _join(self, params: dict[str, Any], state: Sequence[Any]) -> list[Any]:
        rest = iter(state)
        return [params[x.path] if x.role == "param" else next(rest) for x in self._traced.leaves]


def _numpy(values: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {path: np.asarray(value) for path, value in values.items()}
