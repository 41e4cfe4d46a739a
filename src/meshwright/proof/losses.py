"""Loss and gradients on one device: of a traced program, and of the loss as its author wrote it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.compiled.compile_program import quick_options
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.evaluate.widen import wide_evaluator
from meshwright.program.jaxpr.names import path_text
from meshwright.program.trace.adapters import PREFIX, has_reference
from meshwright.program.trace.keep_apart import asks_to_keep_apart
from meshwright.program.trace.model_leaves import Leaf, ModelLeaves
from meshwright.program.trace.requested_layouts import recorded_layouts
from meshwright.program.trace.traced_loss import Loss, LossValue, TracedLoss, read_loss, trace_loss
from meshwright.program.trace.trained_leaves import Adapted, Trained
from meshwright.proof.compare import fetch

Gradient = Callable[[dict[str, Any], list[Any], list[Any], float], tuple[LossValue, dict[str, Any]]]
"""From parameters (in the order of the leaves), other leaves, the leaves of one microbatch and a
factor on the loss to the loss (with its metrics and new values of leaves) and the gradients of its
mean (with the factor)."""


def traced_gradient(traced: TracedLoss, *, wide: bool, flops: float) -> Gradient:
    """Return the gradient of a traced program as it is, in float64 if ``wide``.

    ``flops`` is how much it will compute in total.
    """
    evaluator = wide_evaluator() if wide else Evaluator()
    leaves = traced.leaves

    def mean_loss(params: Any, state: Any, batch: Any, scale: Any) -> tuple[Any, LossValue]:
        rest = iter(state)
        values = [params[x.path] if x.role == "param" else next(rest) for x in leaves]
        value = traced.read_outputs(evaluator.run(traced.closed, [*values, *batch]))
        return value.objective.mean * scale, value

    options = quick_options(0 if wide else flops)
    compiled = jax.jit(jax.value_and_grad(mean_loss, has_aux=True), compiler_options=options)

    def gradient(
        params: dict[str, Any], state: list[Any], batch: list[Any], scale: float
    ) -> tuple[LossValue, dict[str, Any]]:
        (_, value), gradients = compiled(params, state, batch, scale)
        return value, fetch(gradients)

    return gradient


def taken_by_nnx_jit(model: Any) -> bool:
    """Whether `nnx.jit` accepts a model: its static attributes must be hashable, unlike lists."""
    try:
        hash(nnx.graphdef(model))
    except TypeError:
        return False
    return True


class WrittenGradient:
    """The gradient of a loss as its author would compute it: `nnx.value_and_grad` in `nnx.jit`.

    Nothing of Meshwright's tracing is used, not even how it splits a model into leaves.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss,
        trainable: Filter,
        leaves: Sequence[Leaf],
        batch: Any,
        flops: float,
    ) -> None:
        self._model, self._leaves = model, leaves
        self._tree = jax.tree.structure(batch)
        self._options = quick_options(flops)
        trained = nnx.All(trainable, _has_gradient)

        @nnx.jit
        def gradient(model: Any, batch: Any, scale: Any) -> Any:
            def mean_loss(model: Any, batch: Any) -> tuple[Any, Any]:
                with recorded_layouts():  # On one device, sharding constraints have no effect.
                    objective, metrics = read_loss(loss(model, batch))
                return objective.mean * scale, (objective, metrics)

            differentiate = nnx.value_and_grad(
                mean_loss, argnums=nnx.DiffState(0, trained), has_aux=True
            )
            (_, values), gradients = differentiate(model, batch)
            nnx.pop(model, nnx.Intermediate)
            return values, gradients

        self._gradient = gradient
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, params: dict[str, Any], state: list[Any], batch: list[Any], scale: float
    ) -> tuple[LossValue, dict[str, Any]]:
        """Return the loss, with the new other leaves, and its gradients."""
        rest = iter(state)
        values = [params[x.path] if x.role == "param" else next(rest) for x in self._leaves]
        self._assign(values)
        arrays = jax.tree.unflatten(self._tree, batch)
        (objective, metrics), gradients = self._run(self._model, arrays, scale)
        named = _flat(nnx.State(gradients) if isinstance(gradients, dict) else gradients)
        after = [x for _, value in _flat(_state(self._model)) for x in jax.tree.leaves(value)]
        by_role: dict[str, list[Any]] = {"param": [], "state": []}
        for leaf, value in zip(self._leaves, after, strict=True):
            by_role[leaf.role].append(value)
        # What was written shows by its value: `nnx.jit` returns every parameter.
        pairs = zip(params.values(), by_role["param"], strict=True)
        written = {n: x for n, (old, x) in enumerate(pairs) if not np.array_equal(old, x)}
        value = LossValue(objective, metrics, by_role["state"], written)
        return value, fetch(_by_path(named))

    def _run(self, *arguments: Any) -> Any:
        # A call may change the structure of a model, such as a number that it keeps.
        structure = nnx.graphdef(self._model)
        if structure not in self._compiled:
            lowered: Any = self._gradient.lower(*arguments)
            self._compiled[structure] = lowered.compile(compiler_options=self._options)
        return self._compiled[structure](*arguments)

    def _assign(self, values: Sequence[Any]) -> None:
        rest = iter(values)
        state = [
            (path, jax.tree.map(lambda _: jnp.asarray(next(rest)), value))
            for path, value in _flat(_state(self._model))
        ]
        nnx.update(self._model, nnx.from_flat_state(state))


class MergedGradient:
    """The gradient of adapters from the loss as written, with the adapters merged into the weights.

    The gradient of a factor follows from that of the weight. Nothing of how a program is changed to
    have adapters is used.
    """

    def __init__(self, gradient: WrittenGradient, leaves: ModelLeaves) -> None:
        self._gradient, self._leaves = gradient, leaves
        self._adapters = {adapter.path: adapter for adapter in leaves.adapters.values()}

    def __call__(
        self, params: dict[str, Any], state: list[Any], batch: list[Any], scale: float
    ) -> tuple[LossValue, dict[str, Any]]:
        """Return the loss, with the new other leaves, and its gradients."""
        names = [leaf.path for leaf in self._leaves.leaves if leaf.role == "state"]
        others = dict(zip(names, state, strict=True))
        factors = {path: [params[each] for each in a.paths] for path, a in self._adapters.items()}
        own = {path: value for path, value in params.items() if not path.startswith(PREFIX)}
        merged = {
            leaf.path: self._adapters[leaf.path].merged(others[leaf.path], *factors[leaf.path])
            if leaf.path in factors
            else own[leaf.path]
            for leaf in self._leaves.base.leaves
            if leaf.path in factors or leaf.path in own
        }
        rest = [value for path, value in others.items() if path not in factors]
        value, gradients = self._gradient(merged, rest, batch, scale)
        found = {path: gradients[path] for path in own}
        for path, adapter in self._adapters.items():
            weight = others[path]
            _, pull = jax.vjp(lambda *pair, a=adapter, w=weight: a.merged(w, *pair), *factors[path])
            found |= dict(zip(adapter.paths, pull(jnp.asarray(gradients[path])), strict=True))
        after = iter(value.state)
        kept = [others[path] if path in factors else next(after) for path in names]
        return replace(value, state=kept, written={}), fetch({path: found[path] for path in params})


def written_gradient(
    model: Any, loss: Loss, trained: Trained, leaves: ModelLeaves, batch: Any, flops: float
) -> WrittenGradient | MergedGradient | None:
    """Return the gradient of a loss as written; None if adapters are not just added to weights."""
    if isinstance(batch, dict) and callable(model) and asks_to_keep_apart(model, batch):
        return None
    if not isinstance(trained, Adapted):
        return WrittenGradient(model, loss, trained, leaves.leaves, batch, flops)
    if trained.lora.dropout or has_reference(trace_loss(loss, leaves.base, batch).closed):
        return None
    paths = {adapter.path for adapter in leaves.adapters.values()}
    chosen = nnx.Any(trained.also, lambda path, _: path_text(path) in paths)
    roles = [
        replace(leaf, role="param") if leaf.path in paths else leaf for leaf in leaves.base.leaves
    ]
    return MergedGradient(WrittenGradient(model, loss, chosen, roles, batch, flops), leaves)


def _state(model: Any) -> Any:
    return nnx.state(model, nnx.Not(nnx.Intermediate))


def _flat(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return list(nnx.to_flat_state(state))


def _by_path(named: Sequence[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, value in named:
        arrays = jax.tree.leaves(value)
        for number, array in enumerate(arrays):
            values[path_text((*path, number) if len(arrays) > 1 else path)] = array
    return values


def _has_gradient(path: Any, value: Any) -> bool:
    del path
    return all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(value))
