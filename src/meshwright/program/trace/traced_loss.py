"""Tracing a user's loss once to a flat program, which all later passes work on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.errors import UserError
from meshwright.program.evaluate.index_ranges import wrong_indices
from meshwright.program.jaxpr.equations import ClosedJaxpr
from meshwright.program.jaxpr.names import path_text
from meshwright.program.trace.adapters import refuse_reference
from meshwright.program.trace.add_adapters import add_adapters
from meshwright.program.trace.keep_apart import apart
from meshwright.program.trace.layout import Layout, stacked_layout
from meshwright.program.trace.model_leaves import Leaf, ModelLeaves
from meshwright.program.trace.model_program import ModelProgram
from meshwright.program.trace.normalize import normalize
from meshwright.program.trace.replaced_jax import device_reads
from meshwright.trees import Batch, check_num_samples
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
        written: the new values of parameters that the model writes to, by their position among
            the parameter leaves.
    """

    objective: Weighted
    metrics: dict[str, Weighted]
    state: list[Any]
    written: dict[int, Any] = field(default_factory=dict[int, Any])


@dataclass(frozen=True)
class TracedLoss:
    """A loss as a program from (model leaves, batch leaves) to totals, weights and new state.

    Attributes:
        closed: the program. Its inputs are the layout's step leaves, then the batch leaves. Its
            outputs are the objective's total and weight, each metric's total and weight, and the
            new values of the `kept` step leaves.
        layout: the leaves the program runs on, and which of the model's leaves they hold.
        metric_names: names of the metrics, in the program's order.
        written: numbers of the step's parameter leaves that the model writes to in its call.
        remarks: what the loss did while it was traced that the program does not repeat.
    """

    closed: ClosedJaxpr
    layout: Layout
    batch: tuple[BatchLeaf, ...]
    metric_names: tuple[str, ...]
    written: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves the program runs on."""
        return [step.leaf for step in self.layout.step_leaves]

    @property
    def kept(self) -> list[int]:
        """Numbers of the step leaves with a new value: all state, then written parameters."""
        return [*self.layout.numbers("state"), *self.written]

    @property
    def kept_paths(self) -> list[str]:
        """Paths of the `kept` step leaves."""
        return [self.leaves[number].path for number in self.kept]

    @property
    def num_results(self) -> int:
        """How many outputs come before the new values of leaves."""
        return len(self.closed.jaxpr.outvars) - len(self.kept)

    @property
    def written_positions(self) -> list[int]:
        """Positions of the written parameters among the parameter leaves."""
        params = self.layout.numbers("param")
        return [params.index(number) for number in self.written]

    def wrong_indices(self, batch: Batch, *, negative: bool = False) -> list[str]:
        """Say which indices of a batch are out of range; those below zero only if asked."""
        names = [leaf.path for leaf in self.batch]
        return wrong_indices(self.closed, jax.tree.leaves(batch), names, negative=negative)

    def read_outputs(self, outputs: Sequence[Any]) -> LossValue:
        """Return the program's outputs by name."""
        pairs = self.num_results
        totals = [Weighted(outputs[i], outputs[i + 1]) for i in range(0, pairs, 2)]
        metrics = dict(zip(self.metric_names, totals[1:], strict=True))
        written = len(outputs) - len(self.written)
        after = dict(zip(self.written_positions, outputs[written:], strict=True))
        return LossValue(totals[0], metrics, list(outputs[pairs:written]), after)


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
        return [x for w in [objective, *metrics.values()] for x in (w.total, w.weight)]

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
    batch_leaves, base = _describe_batch(batch), model_leaves.base
    program = ModelProgram(function, base, jax.tree.structure(batch), compute_dtype)
    structs = [leaf.struct for leaf in base.leaves]
    structs += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in batch_leaves]
    traced = program.trace(structs)
    paths = [leaf.path for leaf in base.leaves]
    closed = apart(normalize(traced, paths, program.paths_by_class))
    if model_leaves.adapters:
        closed = add_adapters(
            closed,
            len(paths),
            model_leaves.adapters,
            compute_dtype,
            new_state_at=len(closed.jaxpr.outvars) - len(program.written),
            drops=not model_leaves.evaluated,
        )
    elif model_leaves.lora is None:
        refuse_reference(closed)
    layout = stacked_layout(model_leaves.leaves, {})
    return TracedLoss(closed, layout, batch_leaves, (), program.written, tuple(program.remarks))


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


RESERVED_METRICS = ("loss", "grad_norm", "learning_rate", "eval_samples", "halted")
"""Metrics that every run reports itself."""


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
    # The dtype a host array gets on a device: 64-bit types become 32-bit by default.
    on_device = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    batch_leaves = [
        BatchLeaf(path_text(map(_key, path)) or "batch", tuple(x.shape), on_device(x.dtype))
        for path, x in leaves
    ]
    sizes = {leaf.path: leaf.shape[0] for leaf in batch_leaves if leaf.shape}
    if sizes:
        check_num_samples(sizes, "the batch")
    return tuple(batch_leaves)


def _key(entry: Any) -> Any:
    return getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))
