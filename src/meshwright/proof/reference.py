"""The reference: plain training on one device, sharing no code with the step it is compared to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.evaluate.widen import wide_evaluator
from meshwright.program.trace.model_leaves import Leaf, ModelLeaves
from meshwright.program.trace.requested_layouts import recorded_layouts
from meshwright.program.trace.traced_loss import Loss, LossValue, TracedLoss, read_loss
from meshwright.proof.compare import null_leaves
from meshwright.proof.observed import ObservedRun, fetch, withhold

Evaluate = Callable[[list[Any], list[Any]], LossValue]
"""From the model's leaf values and the leaves of one microbatch to the value of the loss."""


def traced_loss(traced: TracedLoss, *, wide: bool) -> Evaluate:
    """Return the evaluation of a traced program as it is, in float64 if ``wide``."""
    evaluator = wide_evaluator() if wide else Evaluator()
    return lambda values, batch: traced.read_outputs(
        evaluator.run(traced.closed, [*values, *batch])
    )


def written_loss(loss: Loss, model_leaves: ModelLeaves, batch: Any) -> Evaluate:
    """Return the evaluation of the loss as its author wrote it; ``batch`` is an example batch."""
    tree = jax.tree.structure(batch)

    def evaluate(values: list[Any], leaves: list[Any]) -> LossValue:
        model = model_leaves.merge(values)
        with recorded_layouts():  # On one device, sharding constraints have no effect.
            objective, _ = read_loss(loss(model, jax.tree.unflatten(tree, leaves)))
        after = model_leaves.values(model)
        return LossValue(objective, {}, [after[i] for i in model_leaves.indices("state")])

    return evaluate


class Reference:
    """Training on one device: microbatches one after another, then an optax update.

    Args:
        evaluate: the loss.
        leaves: the model's leaves.
        microbatches: number of microbatches per batch.
        loss_scale: factor on the loss before differentiation, for half precision.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        leaves: Sequence[Leaf],
        *,
        microbatches: int,
        loss_scale: float = 1.0,
    ) -> None:
        self._evaluate = evaluate
        self._leaves = leaves
        self._count = microbatches
        self._scale = loss_scale
        self._gradient = jax.jit(self._value_and_gradient)

    def first_update(self, values: Sequence[Any], batch: Sequence[Any]) -> ObservedRun:
        """Return loss and gradients of one batch, without an update."""
        params, state = self._split(values)
        loss, gradients, state = self._batch_gradient(params, state, batch)
        return ObservedRun([loss], gradients, fetch(params), self._named(state))

    def run(
        self,
        values: Sequence[Any],
        batches: Sequence[Sequence[Any]],
        optimizer: optax.GradientTransformation,
        clip_norm: float | None,
        groups: Iterable[Collection[str]],
    ) -> ObservedRun:
        """Train from these leaf values on these batches.

        Gradients that are rounding noise are withheld from the optimizer; of each of ``groups``,
        all leaves are withheld or none.
        """
        groups = [frozenset(group) for group in groups]
        first = self.first_update(values, batches[0]).gradients
        withheld = _complete_groups(groups, null_leaves(first))
        while True:
            run, null = self._train(values, batches, _with_clipping(optimizer, clip_norm), withheld)
            if withheld <= null:
                return run
            # Behind weights that start at zero, a gradient is zero only in the first update.
            withheld = _complete_groups(groups, null)

    def _train(
        self,
        values: Sequence[Any],
        batches: Sequence[Sequence[Any]],
        optimizer: optax.GradientTransformation,
        withheld: frozenset[str],
    ) -> tuple[ObservedRun, frozenset[str]]:
        """Train with some gradients withheld; also return those that were noise in every update."""
        params, state = self._split(values)
        moments = optimizer.init(_nested(params))
        losses: list[float] = []
        first: dict[str, Any] = {}
        null = withheld

        @jax.jit
        def update(params: Any, moments: Any, gradients: Any) -> Any:
            tree, visible = _nested(params), withhold(_nested(gradients), withheld)
            updates, moments = optimizer.update(visible, moments, tree)
            changed: Any = optax.apply_updates(tree, updates)
            return flatten_dict(changed, sep="."), moments

        for batch in batches:
            loss, gradients, state = self._batch_gradient(params, state, batch)
            losses.append(loss)
            first = first or gradients
            null &= set(null_leaves(gradients))
            params, moments = update(params, moments, gradients)
        run = ObservedRun(losses, first, fetch(params), self._named(state), withheld=withheld)
        return run, null

    def _batch_gradient(
        self, params: dict[str, Any], state: list[Any], batch: Sequence[Any]
    ) -> tuple[float, dict[str, Any], list[Any]]:
        """Return mean loss, gradients and new state for a batch, summed in float64 on the host."""
        total, weight = np.float64(0), np.float64(0)
        sums: dict[str, Any] = {}
        for number in range(self._count):
            # Strided microbatches like those of the step, written independently of it.
            micro = [np.asarray(leaf)[number :: self._count] for leaf in batch]
            (_, value), gradients = self._gradient(params, state, micro)
            state = value.state
            share = np.float64(value.objective.weight)
            total, weight = total + np.float64(value.objective.total), weight + share
            for path, gradient in fetch(gradients).items():
                part = gradient.astype(np.float64) * (share / self._scale)
                sums[path] = sums[path] + part if path in sums else part
        weight = weight or np.float64(1)
        return float(total / weight), {path: s / weight for path, s in sums.items()}, state

    def _value_and_gradient(
        self, params: dict[str, Any], state: list[Any], batch: list[Any]
    ) -> Any:
        def mean_loss(params: dict[str, Any]) -> tuple[Any, LossValue]:
            value = self._evaluate(self._join(params, state), batch)
            return value.objective.mean * self._scale, value

        return jax.value_and_grad(mean_loss, has_aux=True)(params)

    def _split(self, values: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        pairs = list(zip(self._leaves, values, strict=True))
        params = {leaf.path: value for leaf, value in pairs if leaf.role == "param"}
        return params, [value for leaf, value in pairs if leaf.role == "state"]

    def _join(self, params: dict[str, Any], state: Sequence[Any]) -> list[Any]:
        rest = iter(state)
        return [params[x.path] if x.role == "param" else next(rest) for x in self._leaves]

    def _named(self, state: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
        paths = [leaf.path for leaf in self._leaves if leaf.role == "state"]
        return fetch(dict(zip(paths, state, strict=True)))


def _with_clipping(
    optimizer: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformation:
    if clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def _complete_groups(groups: Iterable[frozenset[str]], paths: Iterable[str]) -> frozenset[str]:
    """Return the members of those groups whose members are all among the paths."""
    known = set(paths)
    return frozenset(path for group in groups if group <= known for path in group)


def _nested(params: dict[str, Any]) -> Any:
    """Return parameters as nested dicts, by whose paths some optimizers choose what to apply."""
    return unflatten_dict(params, sep=".")
