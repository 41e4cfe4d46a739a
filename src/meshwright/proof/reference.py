"""The reference: plain training on one device.

It shares only one thing with the step it is compared to, how optax is called: which arguments an
update takes, and parameters as nested dicts.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.compiled.compile_program import quick_options
from meshwright.program.evaluate.widen import widened
from meshwright.program.jaxpr.equations import ClosedJaxpr
from meshwright.program.jaxpr.names import nest
from meshwright.program.trace.model_leaves import Leaf
from meshwright.proof.compare import Leaves, Masks, ObservedRun, fetch, global_norm
from meshwright.proof.losses import Gradient
from meshwright.proof.nulls import NoiseMasks, within
from meshwright.step.objective import Objective, runs_without_loss
from meshwright.text.json_text import flatten
from meshwright.weighted import Weighted

GRAD_NORM = "grad_norm"
"""The metric that a step adds to those of the loss."""


class OptaxUpdate:
    """An optax update of parameters by canonical path, compiled once for each format."""

    def __init__(self, optimizer: optax.GradientTransformation) -> None:
        self._optimizer = optimizer
        self._looks_at_loss: bool | None = None
        options = quick_options()
        self._init = jax.jit(
            lambda params: optimizer.init(nest(params, escaped=True)), compiler_options=options
        )
        self._update = jax.jit(self._in_their_dtype, compiler_options=options)

    def init(self, params: Leaves) -> Any:
        """Return the optimizer's initial state."""
        return self._init(dict(params))

    def __call__(
        self,
        params: Leaves,
        moments: Any,
        gradients: Leaves,
        loss: Callable[[], Objective] | None = None,
    ) -> tuple[Leaves, Any]:
        """Return new parameters and optimizer state; some optimizers ask for the loss."""
        if not self.looks_at_loss(params, moments, gradients):
            changed, moments = self._update(dict(params), moments, dict(gradients))
        else:
            assert loss is not None, "the optimizer looks at the loss"
            # Operation by operation, so that the loss can be computed on the host.
            as_tree = functools.partial(nest, escaped=True)
            with jax.disable_jit():
                extra = loss().arguments(self._optimizer, as_tree, lambda tree: dict(flatten(tree)))
                changed, moments = self._updated(dict(params), moments, dict(gradients), **extra)
        return fetch(changed), moments

    def looks_at_loss(self, params: Leaves, moments: Any, gradients: Leaves) -> bool:
        """Whether the optimizer cannot do without optax's extra arguments."""
        if self._looks_at_loss is None:
            arguments = (dict(params), moments, dict(gradients))
            self._looks_at_loss = not runs_without_loss(self._updated, arguments)
        return self._looks_at_loss

    def program(self, params: Leaves, moments: Any, gradients: Leaves) -> ClosedJaxpr:
        """Return the update as a program."""
        return jax.make_jaxpr(self._updated)(dict(params), moments, dict(gradients))

    def _in_their_dtype(self, params: Any, moments: Any, gradients: Any) -> Any:
        """Update parameters; float64 ones in float64 throughout, schedules included."""
        floats = [p for p in params.values() if jnp.issubdtype(p.dtype, jnp.floating)]
        wide = bool(floats) and all(p.dtype == jnp.float64 for p in floats)
        update = widened(self._updated) if wide else self._updated
        return update(params, moments, gradients)

    def _updated(self, params: Any, moments: Any, gradients: Any, **extra: Any) -> Any:
        # As nested dicts, by whose paths some optimizers choose what to apply.
        tree = nest(params, escaped=True)
        updates, moments = self._optimizer.update(
            nest(gradients, escaped=True), moments, tree, **extra
        )
        changed: Any = optax.apply_updates(tree, updates)
        return dict(flatten(changed)), moments


@dataclass(frozen=True)
class _BatchGradient:
    """The mean loss, metrics and gradients of one batch, and state and parameters after it.

    Parameters whose paths are in ``written`` were written to by the model.
    """

    loss: float
    metrics: dict[str, float]
    gradients: Leaves
    state: list[Any]
    params: dict[str, Any]
    written: frozenset[str]


@dataclass(frozen=True)
class Reference:
    """Training on one device: microbatches one after another, then an optax update."""

    gradient: Gradient
    leaves: Sequence[Leaf]
    microbatches: int
    _first: list[tuple[Any, _BatchGradient]] = field(
        default_factory=list["tuple[Any, _BatchGradient]"], init=False
    )

    def first_step(
        self, values: Sequence[Any], batch: Sequence[Any], loss_scale: float = 1.0
    ) -> ObservedRun:
        """Return loss, gradients and state after one batch, without the optimizer."""
        found = self._first_gradient(values, batch, loss_scale)
        return ObservedRun(
            [found.loss],
            found.gradients,
            fetch(found.params),
            self._named(found.state),
            written=found.written,
        )

    def _first_gradient(
        self, values: Sequence[Any], batch: Sequence[Any], scale: float = 1.0
    ) -> _BatchGradient:
        """Return the gradient of a batch, computed once for the same lists of values."""
        for (known_values, known_batch, known_scale), found in self._first:
            if known_values is values and known_batch is batch and known_scale == scale:
                return found
        found = self._batch_gradient(*self._split(values), batch, scale)
        # The first one only: steps that are compared one by one start from new values.
        if not self._first:
            self._first.append(((values, batch, scale), found))
        return found

    def run(
        self,
        values: Sequence[Any],
        batches: Sequence[Sequence[Any]],
        update: OptaxUpdate,
        clip_norm: float | None,
        withheld: Masks | None = None,
    ) -> ObservedRun:
        """Train from these leaf values on these batches.

        Gradients that are rounding noise are withheld from the optimizer: those of ``withheld``, or
        those that are noise in every step.
        """
        if withheld is not None:
            return self._train(values, batches, update, clip_norm, withheld)[0]
        noise = NoiseMasks()
        noise.add(self.first_step(values, batches[0]).gradients)
        withheld = noise.masks()
        while True:
            run, noise = self._train(values, batches, update, clip_norm, withheld)
            masks = noise.masks()
            if within(withheld, masks):
                return run
            # Behind weights that start at zero, a gradient is zero only in the first step.
            withheld = {
                path: mask & withheld[path] for path, mask in masks.items() if path in withheld
            }

    def _train(
        self,
        values: Sequence[Any],
        batches: Sequence[Sequence[Any]],
        update: OptaxUpdate,
        clip_norm: float | None,
        withheld: Masks,
    ) -> tuple[ObservedRun, NoiseMasks]:
        """Train with some gradients withheld; also return what was noise in every step."""
        params, state = self._split(values)
        moments = update.init(params)
        found: list[_BatchGradient] = []
        noise = NoiseMasks()
        for number, batch in enumerate(batches):
            own = (params, state, batch, 1.0)
            one = self._batch_gradient(*own) if number else self._first_gradient(values, batch)
            objective = functools.partial(self._objective, one, state, batch)
            found.append(one)
            state, params = one.state, one.params
            noise.add(one.gradients)
            visible = _clipped(_without(one.gradients, withheld), clip_norm)
            params, moments = update(params, moments, visible, objective)
        run = ObservedRun(
            [each.loss for each in found],
            found[0].gradients,
            fetch(params),
            self._named(state),
            withheld=withheld,
            metrics=[each.metrics for each in found],
        )
        return run, noise

    def _objective(
        self, found: _BatchGradient, state: list[Any], batch: Sequence[Any]
    ) -> Objective:
        """Return the loss of a batch, evaluated on the host wherever the optimizer asks for it."""

        def evaluate(params: Any) -> tuple[Any, dict[str, Any]]:
            with jax.disable_jit(disable=False):
                there = self._batch_gradient(fetch(params), state, batch, 1.0)
            return jnp.asarray(there.loss), _as_arrays(there.gradients)

        return Objective(jnp.asarray(found.loss), _as_arrays(found.gradients), evaluate)

    def _batch_gradient(
        self, params: Leaves, state: list[Any], batch: Sequence[Any], scale: float
    ) -> _BatchGradient:
        """Return the gradient of one batch, summed in float64 on the host."""
        losses, metrics = list[Weighted](), defaultdict[str, list[Weighted]](list)
        sums: dict[str, Any] = {}
        params, paths, written = dict(params), list(params), set[str]()
        for number in range(self.microbatches):
            # Strided microbatches like those of the step, written independently of it.
            micro = [np.asarray(leaf)[number :: self.microbatches] for leaf in batch]
            value, gradients = self.gradient(dict(params), state, micro, scale)
            state, share = value.state, np.float64(value.objective.weight)
            new = {paths[position]: x for position, x in value.written.items()}
            params |= new
            written |= set(new)
            losses.append(value.objective)
            for name, metric in value.metrics.items():
                metrics[name].append(metric)
            for path, gradient in gradients.items():
                wide = np.complex128 if np.iscomplexobj(gradient) else np.float64
                part = gradient.astype(wide) * (share / scale)
                sums[path] = sums[path] + part if path in sums else part
        weight = sum(float(part.weight) for part in losses)
        mean = {path: s / (weight or 1) for path, s in sums.items()}
        norm = math.sqrt(sum(float((np.abs(g) ** 2).sum()) for g in mean.values()))
        reported = {name: _mean(parts) for name, parts in metrics.items()}
        return _BatchGradient(
            _mean(losses),
            reported | {GRAD_NORM: norm},
            mean,
            state,
            params,
            frozenset(written),
        )

    def _split(self, values: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        pairs = list(zip(self.leaves, values, strict=True))
        params = {leaf.path: value for leaf, value in pairs if leaf.role == "param"}
        return params, [value for leaf, value in pairs if leaf.role == "state"]

    def _named(self, state: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
        paths = [leaf.path for leaf in self.leaves if leaf.role == "state"]
        return fetch(dict(zip(paths, state, strict=True)))


def _without(gradients: Leaves, withheld: Masks) -> Leaves:
    return {
        path: np.where(withheld[path], 0, gradient) if path in withheld else gradient
        for path, gradient in gradients.items()
    }


def _clipped(gradients: Leaves, clip_norm: float | None) -> Leaves:
    norm = global_norm(gradients)
    if clip_norm is None or norm <= clip_norm:
        return gradients
    return {path: gradient * (clip_norm / norm) for path, gradient in gradients.items()}


def _mean(parts: Sequence[Weighted]) -> float:
    weight = sum(float(part.weight) for part in parts)
    return sum(float(part.total) for part in parts) / (weight or 1.0)


def _as_arrays(leaves: Leaves) -> dict[str, Any]:
    return {path: jnp.asarray(value) for path, value in leaves.items()}
