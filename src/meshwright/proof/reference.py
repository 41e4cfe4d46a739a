"""The reference: training on one device by the shortest path, sharing no pass with the step."""

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
from meshwright.program.trace.traced_loss import Loss, LossValue, TracedLoss, read_loss
from meshwright.proof.compare import null_leaves
from meshwright.proof.observed import Observed, fetch, withhold

Evaluate = Callable[[list[Any], list[Any]], LossValue]
"""From the model's leaf values and the leaves of one microbatch to the loss's value."""


def traced_loss(traced: TracedLoss, *, wide: bool) -> Evaluate:
    """Evaluate a traced program as it stands, in float64 if ``wide``."""
    evaluator = wide_evaluator() if wide else Evaluator()
    return lambda values, batch: traced.read_outputs(
        evaluator.run(traced.closed, [*values, *batch])
    )


def written_loss(loss: Loss, model_leaves: ModelLeaves, batch: Any) -> Evaluate:
    """Evaluate the loss as its author wrote it; ``batch`` shows how a batch is nested."""
    tree = jax.tree.structure(batch)

    def evaluate(values: list[Any], leaves: list[Any]) -> LossValue:
        model = model_leaves.merge(values)
        objective, _ = read_loss(loss(model, jax.tree.unflatten(tree, leaves)))
        after = model_leaves.values(model)
        return LossValue(objective, {}, [after[i] for i in model_leaves.indices("state")])

    return evaluate


class Reference:
    """One device, one microbatch after another, one optax update.

    Args:
        evaluate: the loss.
        leaves: the model's leaves.
        microbatches: how many a batch is divided into.
        loss_scale: factor on the loss while gradients are taken, which half precision needs.
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

    def first_update(self, values: Sequence[Any], batch: Sequence[Any]) -> Observed:
        """Return the loss and the gradients of one batch; nothing is trained."""
        params, state = self._split(values)
        loss, gradients, state = self._batch_gradient(params, state, batch)
        return Observed([loss], gradients, fetch(params), self._named(state))

    def run(
        self,
        values: Sequence[Any],
        batches: Sequence[Sequence[Any]],
        optimizer: optax.GradientTransformation,
        clip_norm: float | None,
        groups: Iterable[Collection[str]],
    ) -> Observed:
        """Train from these leaf values on these batches.

        Leaves whose gradient is rounding noise are withheld from the optimizer; of ``groups``,
        all leaves or none.
        """
        groups = [frozenset(group) for group in groups]
        first = self.first_update(values, batches[0]).gradients
        withheld = _all_of(groups, null_leaves(first))
        while True:
            found, null = self._train(values, batches, _clipping(optimizer, clip_norm), withheld)
            if withheld <= null:
                return found
            # A leaf behind weights that start at zero has no gradient only at first.
            withheld = _all_of(groups, null)

    def _train(
        self,
        values: Sequence[Any],
        batches: Sequence[Sequence[Any]],
        optimizer: optax.GradientTransformation,
        withheld: frozenset[str],
    ) -> tuple[Observed, frozenset[str]]:
        """Train without the gradients withheld; also return which of them were always noise."""
        params, state = self._split(values)
        moments = optimizer.init(_nested(params))
        losses: list[float] = []
        first: dict[str, Any] = {}
        null = withheld

        @jax.jit
        def update(params: Any, moments: Any, gradients: Any) -> Any:
            tree, given = _nested(params), withhold(_nested(gradients), withheld)
            updates, moments = optimizer.update(given, moments, tree)
            changed: Any = optax.apply_updates(tree, updates)
            return flatten_dict(changed, sep="."), moments

        for batch in batches:
            loss, gradients, state = self._batch_gradient(params, state, batch)
            losses.append(loss)
            first = first or gradients
            null &= set(null_leaves(gradients))
            params, moments = update(params, moments, gradients)
        found = Observed(losses, first, fetch(params), self._named(state), withheld=withheld)
        return found, null

    def _batch_gradient(
        self, params: dict[str, Any], state: list[Any], batch: Sequence[Any]
    ) -> tuple[float, dict[str, Any], list[Any]]:
        """Return mean loss, its gradients and the state after a batch; sums are the host's."""
        total, weight = np.float64(0), np.float64(0)
        sums: dict[str, Any] = {}
        for number in range(self._count):
            # Every count-th sample, written out: what the step calls a strided microbatch.
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


def _clipping(
    optimizer: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformation:
    if clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def _all_of(groups: Iterable[frozenset[str]], paths: Iterable[str]) -> frozenset[str]:
    """Return those groups all of whose members are among the paths."""
    known = set(paths)
    return frozenset(path for group in groups if group <= known for path in group)


def _nested(params: dict[str, Any]) -> Any:
    """Return parameters as optimizers see them, by which some choose what to do with each."""
    return unflatten_dict(params, sep=".")
