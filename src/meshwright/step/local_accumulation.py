"""Gradient accumulation on each device, with one reduction for several microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from meshwright.program.trace.precision_policy import zeros_for_sums
from meshwright.step.gradients import (
    Gradients,
    LossFunction,
    finish_gradients,
    replaced,
    value_and_grad,
)


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
    grad = value_and_grad(function)
    reduce = _psum_joined if joined else jax.lax.psum
    axes = tuple(batch_axes)

    def group_sums(
        params: list[Any],
        kept: tuple[list[Any], dict[int, Any]],
        group: list[Any],
        scale: Array | None,
    ) -> Any:
        def accumulate(carry: Any, microbatch: list[Any]) -> tuple[Any, Any]:
            (model_state, new), sums = carry
            (_, value), grads = grad(replaced(params, new), model_state, microbatch, scale)
            weight = value.objective.weight
            sums = [s + g * weight for s, g in zip(sums, grads, strict=True)]
            return ((value.state, value.written), sums), (value.objective, value.metrics)

        start = (kept, zeros_for_sums(params))
        (kept, sums), parts = _loop(accumulate, start, group)
        totals = jax.tree.map(lambda part: part.sum(), parts)
        return kept, *reduce((sums, totals), axes)

    replicated, divided = PartitionSpec(), PartitionSpec(None, axes)
    mapped = jax.shard_map(
        group_sums,
        mesh=mesh,
        in_specs=(replicated, replicated, divided, replicated),
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
    ((model_state, new), sums), (objectives, metrics) = _loop(next_group, start, groups)
    params = replaced(params, new)
    return finish_gradients(params, sums, objectives, metrics, list(model_state), scale)


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
        own = [number for number, leaf in enumerate(leaves) if leaf.dtype == dtype]
        joined = jax.lax.psum(jnp.concatenate([leaves[n].ravel() for n in own]), axes)
        ends = np.cumsum([leaves[n].size for n in own])[:-1]
        for number, part in zip(own, jnp.split(joined, ends), strict=True):
            summed[number] = part.reshape(leaves[number].shape)
    return jax.tree.unflatten(tree, [summed[n] for n in range(len(leaves))])
