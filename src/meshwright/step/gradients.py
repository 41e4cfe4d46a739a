"""Loss and gradients of one step, accumulated over its microbatches.

Gradients are reduced over devices after each microbatch, or once for several of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.evaluate.known_casts import KnownCasts, dtypes_read
from meshwright.program.jaxpr.equations import REMATS, bind
from meshwright.program.trace.precision_policy import zeros_for_sums
from meshwright.program.trace.traced_loss import LossValue
from meshwright.weighted import Weighted

LossFunction = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], LossValue]
"""From (params, model state, batch leaves) to the value of the loss."""


_Kept = tuple[list[Any], dict[int, Any]]
"""Model state and written parameters: what a microbatch takes over from the one before."""


@dataclass(frozen=True)
class Gradients:
    """Mean loss, its gradients and the means of reported metrics, of one batch.

    The model's other leaves, and the parameters, which a model may write to, are those after the
    forward pass.
    """

    values: list[Any]
    loss: Array
    metrics: dict[str, Array]
    model_state: list[Any]
    params: list[Any]


def compute_gradients(
    function: LossFunction,
    params: Sequence[Any],
    model_state: Sequence[Any],
    batch: Sequence[Any],
    scale: Array | None = None,
) -> Gradients:
    """Return the gradients of one batch; ``scale`` multiplies the loss before differentiation."""
    grad = value_and_grad(function)
    (_, value), grads = grad(list(params), list(model_state), list(batch), scale)
    return Gradients(
        values=_unscale(grads, scale),
        loss=value.objective.mean,
        metrics={name: metric.mean for name, metric in value.metrics.items()},
        model_state=value.state,
        params=replaced(params, value.written),
    )


def accumulate_gradients(
    function: LossFunction,
    params: Sequence[Any],
    model_state: Sequence[Any],
    microbatches: Sequence[Any],
    scale: Array | None = None,
    constrain: Callable[[list[Any]], list[Any]] = lambda gradients: gradients,
    written: Sequence[int] = (),
) -> Gradients:
    """Return the gradients of stacked microbatches [count, …], computed one after another.

    Each microbatch counts with its weight, so the result is the gradient of the mean over the
    whole batch. ``constrain`` fixes the sharding of the running sums. Each microbatch starts from
    the state and the ``written`` parameters of the one before.
    """
    kept = (list(model_state), {n: params[n] for n in written})
    found = _accumulate(function, params, kept, list(microbatches), scale, constrain)
    return _finished(params, found, scale)


def accumulate_locally(
    function: LossFunction,
    params: Sequence[Any],
    model_state: Sequence[Any],
    microbatches: Sequence[Any],
    *,
    every: int,
    mesh: Mesh,
    batch_axes: Mapping[str, int],
    joined: bool = False,
    scale: Array | None = None,
    written: Sequence[int] = (),
) -> Gradients:
    """Return the gradients of stacked microbatches [count, …], reduced once per ``every`` of them.

    ``function`` gets one device's samples. Each device adds up its own weighted gradients; the
    sums are reduced over devices at the end of each group, ``joined`` to one array or each by
    itself. The state and the ``written`` parameters do not depend on the samples, so every device
    computes the same.
    """
    reduce = _psum_joined if joined else jax.lax.psum
    axes = tuple(batch_axes)

    def group_sums(params: list[Any], kept: _Kept, group: list[Any], scale: Array | None) -> Any:
        (kept, sums), parts = _accumulate(function, params, kept, group, scale)
        totals = jax.tree.map(lambda part: part.sum(), parts)
        return kept, *reduce((sums, totals), axes)

    replicated, sharded = PartitionSpec(), PartitionSpec(None, axes)
    mapped = jax.shard_map(
        group_sums,
        mesh=mesh,
        in_specs=(replicated, replicated, sharded, replicated),
        out_specs=(replicated, replicated, replicated),
        axis_names=set(axes),
        check_vma=False,
    )

    def next_group(carry: Any, group: list[Any]) -> tuple[Any, Any]:
        kept, sums = carry
        kept, more, totals = mapped(list(params), kept, group, scale)
        return (kept, [a + b for a, b in zip(sums, more, strict=True)]), totals

    groups = [a.reshape(a.shape[0] // every, every, *a.shape[1:]) for a in microbatches]
    start = ((list(model_state), {n: params[n] for n in written}), zeros_for_sums(params))
    return _finished(params, _loop(next_group, start, groups), scale)


def _finished(params: Sequence[Any], found: Any, scale: Array | None) -> Gradients:
    ((model_state, new), sums), (objectives, metrics) = found
    params = replaced(params, new)
    return finish_gradients(params, sums, objectives, metrics, list(model_state), scale)


def _accumulate(
    function: LossFunction,
    params: Sequence[Any],
    kept: _Kept,
    microbatches: list[Any],
    scale: Array | None,
    constrain: Callable[[list[Any]], list[Any]] = lambda gradients: gradients,
) -> tuple[tuple[_Kept, list[Any]], tuple[Weighted, dict[str, Weighted]]]:
    """Return what the last microbatch keeps and the weighted sums of gradients, and all losses."""

    def evaluate(params: list[Any], model_state: list[Any], microbatch: list[Any]) -> Any:
        return _weighted_gradients(function, params, model_state, microbatch, scale)

    one = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in microbatches]
    several = microbatches[0].shape[0] > 1
    run = _with_casts_made_once(evaluate, params, kept, one) if several else evaluate

    def accumulate(carry: Any, microbatch: list[Any]) -> tuple[Any, Any]:
        (model_state, new), sums = carry
        value, grads = run(replaced(params, new), model_state, microbatch)
        sums = constrain([s + g for s, g in zip(sums, grads, strict=True)])
        return ((value.state, value.written), sums), (value.objective, value.metrics)

    return _loop(accumulate, (kept, constrain(zeros_for_sums(params))), microbatches)


def _weighted_gradients(
    function: LossFunction,
    params: list[Any],
    model_state: list[Any],
    batch: list[Any],
    scale: Array | None,
) -> tuple[LossValue, list[Any]]:
    """Return the value of a microbatch, and the gradients of its mean, times its weight."""
    mean, pullback, value = jax.vjp(
        lambda params: _scaled_mean(function, params, model_state, batch, scale),
        params,
        has_aux=True,
    )
    weight = value.objective.weight
    if scale is not None:
        (gradients,) = pullback(jnp.ones_like(mean))
        return value, [g * weight for g in gradients]
    # Multiplied first, so that products can add their results to the sums.
    (gradients,) = pullback(weight.astype(mean.dtype))
    return value, gradients


def _with_casts_made_once(
    evaluate: Callable[..., Any], params: Sequence[Any], kept: _Kept, microbatch: list[Any]
) -> Callable[..., Any]:
    """Return a function of (params, model state, microbatch) that does not cast the params again.

    Compilers leave what depends on no microbatch inside of the loop over them. Where blocks are
    recomputed, or run in a loop, each casts its own weights: to keep all casts takes memory.
    """
    model_state, written = kept
    trace = jax.make_jaxpr(evaluate, return_shape=True)
    closed, shapes = trace(list(params), model_state, microbatch)
    eqns, inputs = closed.jaxpr.eqns, closed.jaxpr.invars[: len(params)]
    blocks_cast = any(eqn.primitive.name in {*REMATS, "scan", "while"} for eqn in eqns)
    read = dtypes_read([] if blocks_cast else eqns, inputs)
    casts = [
        p if n in written else p.astype(dtype)
        for n, (p, dtype) in enumerate(zip(params, read, strict=True))
    ]

    def run(params: list[Any], model_state: list[Any], microbatch: list[Any]) -> Any:
        # Nothing else is evaluated by rules: what is recomputed has to stay as it is.
        evaluator = Evaluator(
            [KnownCasts(params, casts), lambda eqn, env: bind(eqn, env.operands(eqn))]
        )
        leaves = jax.tree.leaves((params, model_state, microbatch))
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluator.run(closed, leaves))

    return run


def finish_gradients(
    params: Sequence[Any],
    sums: Sequence[Any],
    objectives: Weighted,
    metrics: dict[str, Weighted],
    model_state: list[Any],
    scale: Array | None,
) -> Gradients:
    """Divide the weighted sums of all microbatches by the total weight.

    Gradients are cast back to the dtype of their parameters, which are those after the last
    microbatch.
    """
    objective = _sum(objectives)
    weight = jnp.where(objective.weight == 0, 1, objective.weight)
    return Gradients(
        values=_unscale(
            [(s / weight).astype(p.dtype) for s, p in zip(sums, params, strict=True)], scale
        ),
        loss=objective.mean,
        metrics={name: _sum(metric).mean for name, metric in metrics.items()},
        model_state=model_state,
        params=list(params),
    )


def replaced(params: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    """Return parameters with new values of some, by position."""
    return [new.get(number, value) for number, value in enumerate(params)]


def value_and_grad(function: LossFunction) -> Callable[..., Any]:
    """Return (params, model state, batch, scale) → ((scaled mean loss, value), gradients)."""
    return jax.value_and_grad(partial(_scaled_mean, function), has_aux=True)


def _scaled_mean(
    function: LossFunction,
    params: list[Any],
    model_state: list[Any],
    batch: list[Any],
    scale: Array | None,
) -> tuple[Array, LossValue]:
    value = function(params, model_state, batch)
    # Differentiate the mean, not the total: in fp16 the cotangents of a sum would overflow.
    mean = value.objective.mean
    return (mean if scale is None else mean * scale.astype(mean.dtype)), value


def _unscale(gradients: Sequence[Any], scale: Array | None) -> list[Any]:
    return [g if scale is None else g / scale.astype(g.dtype) for g in gradients]


def _sum(stacked: Weighted) -> Weighted:
    return Weighted(stacked.total.sum(), stacked.weight.sum())


def _loop(body: Callable[[Any, Any], tuple[Any, Any]], start: Any, rows: list[Any]) -> Any:
    """Run a body on each row; a single one without a loop, in which CPUs convolve slowly."""
    if rows[0].shape[0] > 1:
        return jax.lax.scan(body, start, rows)
    carry, results = body(start, [row[0] for row in rows])
    return carry, jax.tree.map(lambda result: result[None], results)


def _psum_joined(values: Any, axes: tuple[str, ...]) -> Any:
    """Sum values over devices with one reduction for all arrays of a dtype."""
    leaves, tree = jax.tree.flatten(values)
    summed: dict[int, Array] = {}
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        own = {number: leaf for number, leaf in enumerate(leaves) if leaf.dtype == dtype}
        joined, split = ravel_pytree(own)
        summed |= split(jax.lax.psum(joined, axes))
    return jax.tree.unflatten(tree, [summed[n] for n in range(len(leaves))])
