"""Tracing a user's loss once to a flat program, which all later passes work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.errors import UserError
from meshwright.program.jaxpr.equations import ClosedJaxpr
from meshwright.program.jaxpr.names import path_text
from meshwright.program.trace.device_reads import device_reads
from meshwright.program.trace.layout import Layout, plain_layout
from meshwright.program.trace.model_leaves import Leaf, ModelLeaves
from meshwright.program.trace.normalize import normalize
from meshwright.program.trace.precision_policy import cast_floats, follow_policy
from meshwright.program.trace.python_state import (
    Change,
    PythonState,
    apply_changes,
    describe_changes,
    refuse_effect,
    refuse_kept_arrays,
)
from meshwright.program.trace.requested_layouts import recorded_layouts
from meshwright.program.trace.scopes import module_scopes
from meshwright.trees import Batch, check_num_samples
from meshwright.user_code import doing, explaining_axis_names
from meshwright.weighted import Weighted

Model = Any
"""An NNX module, or a dict of NNX modules."""

Scalar = Array | float
LossOutput = (
    Scalar | Weighted | tuple[Scalar | Weighted, Mapping[str, Scalar] | Mapping[str, Weighted]]
)
"""A scalar mean, or a total and its weight; optionally with a dict of metrics of either kind."""

Loss = Callable[[Model, Batch], LossOutput]
"""From a model and a batch to the loss, and optionally metrics."""


@dataclass(frozen=True)
class BatchLeaf:
    """One array of a batch: its path and its global shape, dim 0 being the sample."""

    path: str
    shape: tuple[int, ...]
    dtype: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossValue:
    """The result of one evaluation of the loss.

    Attributes:
        objective: total and weight of the loss that is minimised.
        metrics: totals and weights of the reported metrics.
        state: the new state, in the order of the model's state leaves.
    """

    objective: Weighted
    metrics: dict[str, Weighted]
    state: list[Any]


@dataclass(frozen=True)
class TracedLoss:
    """A loss as a program from (model leaves, batch leaves) to totals, weights and new state.

    Attributes:
        closed: the program. Its inputs are the layout's step leaves, then the batch leaves. Its
            outputs are the objective's total and weight, each metric's total and weight, and the
            new values of the step leaves with role ``state``.
        layout: the leaves the program runs on, and which of the model's leaves they hold.
        batch: the batch's leaves.
        metric_names: names of the metrics, in the program's order.
        remarks: what the loss did while it was traced that the program does not repeat.
    """

    closed: ClosedJaxpr
    layout: Layout
    batch: tuple[BatchLeaf, ...]
    metric_names: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves the program runs on."""
        return [step.leaf for step in self.layout.step_leaves]

    @property
    def num_results(self) -> int:
        """How many outputs come before the new state."""
        return len(self.closed.jaxpr.outvars) - len(self.layout.select("state"))

    def read_outputs(self, outputs: Sequence[Any]) -> LossValue:
        """Return the program's outputs by name."""
        pairs = self.num_results
        totals = [Weighted(outputs[i], outputs[i + 1]) for i in range(0, pairs, 2)]
        metrics = dict(zip(self.metric_names, totals[1:], strict=True))
        return LossValue(totals[0], metrics, list(outputs[pairs:]))


def trace_loss(
    loss: Loss, model_leaves: ModelLeaves, batch: Batch, compute_dtype: Any = None
) -> TracedLoss:
    """Trace ``loss(model, batch)``; ``batch`` holds arrays or their shapes.

    Parameters enter in float32 and are cast to ``compute_dtype`` inside the program.
    """
    names: list[str] = []

    def results(model: Model, batch: Batch) -> list[Any]:
        objective, metrics = read_loss(loss(model, batch))
        names[:] = metrics
        weighted = [objective, *metrics.values()]
        return [x for w in weighted for x in (w.total, w.weight)]

    with device_reads(loss, *model_leaves.classes) as reads:
        traced = trace_function(results, model_leaves, batch, compute_dtype)
    remarks = (*reads, *traced.remarks)
    return replace(traced, metric_names=tuple(names), remarks=remarks)


def trace_function(
    function: Callable[[Model, Batch], list[Any]],
    model_leaves: ModelLeaves,
    batch: Batch,
    compute_dtype: Any = None,
) -> TracedLoss:
    """Trace ``function(model, batch)``, whose list of arrays becomes the program's results."""
    batch_tree = jax.tree.structure(batch)
    batch_leaves = _describe_batch(batch)
    changed: set[int] = set()
    paths_by_class: dict[str, Sequence[str]] = {}
    weights = {i for i, leaf in enumerate(model_leaves.leaves) if leaf.is_weight}
    count = len(model_leaves.leaves)
    python_changes: list[Change] = []
    written: dict[str, None] = {}

    def program(*inputs: Any) -> list[Any]:
        values = [
            cast_floats(value, jnp.float32, compute_dtype) if i in weights - changed else value
            for i, value in enumerate(inputs[:count])
        ]
        model = model_leaves.merge(values)
        follow_policy(model, compute_dtype)
        apply_changes(model, python_changes)
        before = PythonState(model)
        with module_scopes(model, compute_dtype) as paths:
            paths_by_class.update(paths)
            with doing("tracing the loss"), explaining_axis_names(), recorded_layouts():
                results = function(model, jax.tree.unflatten(batch_tree, inputs[count:]))
        python_changes[:] = before.changes()
        refuse_kept_arrays(python_changes)
        after = model_leaves.values(model)
        params = [i for i in model_leaves.indices("param") if after[i] is not values[i]]
        written.update({model_leaves.leaves[i].path: None for i in params})
        changed.update(i for i in model_leaves.indices("state") if after[i] is not values[i])
        state = [
            after[i].astype(model_leaves.leaves[i].dtype) if i in changed else inputs[i]
            for i in model_leaves.indices("state")
        ]
        return [*results, *state]

    structs = [leaf.struct for leaf in model_leaves.leaves]
    structs += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in batch_leaves]
    traced = jax.make_jaxpr(program)(*structs)
    remarks = _describe_written(list(written))
    if python_changes:
        first = list(python_changes)
        again = jax.make_jaxpr(lambda *inputs: program(*inputs))(*structs)
        if str(again) != str(traced):
            refuse_effect(first)
        remarks += describe_changes(python_changes)
        python_changes.clear()
    if compute_dtype is not None and changed & weights:
        # Weights that the loss changes (a moving average) must not be rounded.
        traced = jax.make_jaxpr(lambda *inputs: program(*inputs))(*structs)
    closed = normalize(traced, [leaf.path for leaf in model_leaves.leaves], paths_by_class)
    layout = plain_layout(model_leaves.leaves)
    return TracedLoss(closed, layout, batch_leaves, (), tuple(remarks))


def read_loss(out: Any) -> tuple[Weighted, dict[str, Weighted]]:
    """Read what a loss returned: a scalar mean or `Weighted`, optionally with a dict of metrics."""
    metrics: Mapping[str, Any] = {}
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping):
        out, metrics = out
    _check_metrics(metrics)
    _check_differentiable(out)
    return _weighted("the loss", out), {
        k: _weighted(f"metric `{k}`", v) for k, v in metrics.items()
    }


RESERVED_METRICS = ("loss", "grad_norm", "learning_rate", "eval_samples")
"""Metrics that every training reports itself."""


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    for name in metrics:
        if name in RESERVED_METRICS:
            raise UserError(
                f"the loss returns a metric named `{name}`",
                why=f"training reports its own `{name}` under this name",
                fix=f"give it another name, such as `my_{name}`, or leave it out",
            )


def _check_differentiable(out: Any) -> None:
    total = out.total if isinstance(out, Weighted) else out
    dtype = getattr(total, "dtype", None)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise UserError(
            f"the loss is of type {dtype}",
            why="whole numbers have no gradient, so nothing would be trained",
            fix="return what is minimised, such as a cross entropy, and counts as metrics",
        )


def _describe_written(paths: Sequence[str]) -> list[str]:
    if not paths:
        return []
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return [
        f"the model writes to `{paths[0]}`{more} in its call, which is also trained; the written "
        "value is used in that call only, and the update starts from the value before it (nnx.jit "
        "keeps the written one); make it another kind of variable than nnx.Param to keep it"
    ]


def _weighted(name: str, value: Any) -> Weighted:
    if not isinstance(value, Weighted):
        value = Weighted(value, jnp.ones((), jnp.float32))
    for part in (value.total, value.weight):
        shape = getattr(part, "shape", ()) if not isinstance(part, int | float) else ()
        if shape != () or (not hasattr(part, "dtype") and not isinstance(part, int | float)):
            raise UserError(
                f"{name} is not a scalar",
                why=_describe_value(part),
                fix="return its mean, or mw.Weighted(total, weight)",
            )
    return Weighted(jnp.asarray(value.total, jnp.float32), jnp.asarray(value.weight, jnp.float32))


def _describe_value(value: Any) -> str:
    # Not the type of an array: inside a trace it is a tracer, which says nothing to the user.
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"it has shape {value.shape} and type {value.dtype}"
    return "it is None" if value is None else f"it is of type {type(value).__name__}"


def _describe_batch(batch: Any) -> tuple[BatchLeaf, ...]:
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    batch_leaves = [
        BatchLeaf(path_text(_key(k) for k in path) or "batch", tuple(leaf.shape), _on_device(leaf))
        for path, leaf in leaves
    ]
    sizes = {leaf.path: leaf.shape[0] for leaf in batch_leaves if leaf.shape}
    if sizes:
        check_num_samples(sizes, "the batch")
    return tuple(batch_leaves)


def _on_device(leaf: Any) -> Any:
    """Return the dtype a host array gets on a device: 64-bit types become 32-bit by default."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)


def _key(entry: Any) -> Any:
    return getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))
