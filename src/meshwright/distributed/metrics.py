"""DistributedMetrics: reductions of metrics over the devices of a named axis."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from meshwright.distributed.argument_forms import (
    DEFAULT_AXIS,
    AxisName,
    require_axes,
    resolve_axes,
    static_twin,
    tracks_varying,
)
from meshwright.errors import UserError, did_you_mean
from meshwright.trees import PyTree

Reduction = str | Callable[[jax.Array], jax.Array]
"""``"mean"``, ``"sum"``, ``"max"``, ``"min"``, or a function of the values of all devices."""

Weights = jax.Array | NDArray[Any] | float
"""One number per device, or an array that broadcasts to each metric."""


class DistributedMetrics(nnx.Module):
    """Combines metrics inside ``jax.shard_map`` or ``jax.vmap``, leaf by leaf.

    Python numbers are the same on every device and stay as they are. Under plain ``jax.jit``
    metrics are already global: mean, max and min return them unchanged, and the other reductions,
    which need one value per device, raise an error.

    Each method also exists as a static one, with the suffix ``_static``.
    """

    def all_gather(self, metrics: PyTree, axis_name: AxisName = DEFAULT_AXIS) -> PyTree:
        """Stack the values of all devices in a new dim 0."""
        axes = require_axes(axis_name, "all_gather")
        return _map_arrays(lambda leaf: _gather(leaf, axes), metrics)

    def reduce_mean(
        self, metrics: PyTree, axis_name: AxisName = DEFAULT_AXIS, weights: Weights | None = None
    ) -> PyTree:
        """Average over the devices; with ``weights``, by this device's number of samples.

        ``weights`` is one number per device, or an array that broadcasts to each metric. A device
        of weight 0 does not count, even if its value is NaN; if all weights are 0 the mean is NaN.
        """
        axes = resolve_axes(axis_name)
        if not axes:
            return metrics
        if weights is None:
            return _map_arrays(lambda leaf: jax.lax.pmean(leaf, axes), metrics)
        return _map_arrays(lambda leaf: _weighted_mean(leaf, weights, axes), metrics)

    def reduce_sum(self, metrics: PyTree, axis_name: AxisName = DEFAULT_AXIS) -> PyTree:
        """Return the sum over the devices."""
        axes = require_axes(axis_name, "reduce_sum")
        return _map_arrays(lambda leaf: jax.lax.psum(leaf, axes), metrics)

    def reduce_max(self, metrics: PyTree, axis_name: AxisName = DEFAULT_AXIS) -> PyTree:
        """Return the largest value over the devices."""
        axes = resolve_axes(axis_name)
        return _map_arrays(lambda leaf: jax.lax.pmax(leaf, axes), metrics) if axes else metrics

    def reduce_min(self, metrics: PyTree, axis_name: AxisName = DEFAULT_AXIS) -> PyTree:
        """Return the smallest value over the devices."""
        axes = resolve_axes(axis_name)
        return _map_arrays(lambda leaf: jax.lax.pmin(leaf, axes), metrics) if axes else metrics

    def reduce_custom(
        self,
        metrics: Mapping[str, PyTree],
        reduce_fn: Mapping[str, Reduction | None] | Reduction | None = None,
        axis_name: AxisName = DEFAULT_AXIS,
    ) -> dict[str, PyTree]:
        """Reduce each metric with its own reduction.

        ``reduce_fn`` maps metric names to ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or a function
        of the values of all devices, stacked in dim 0. A single reduction applies to all metrics;
        metrics without one are averaged.
        """
        chosen = reduce_fn if isinstance(reduce_fn, Mapping) else dict.fromkeys(metrics, reduce_fn)
        for name in chosen:
            if name not in metrics:
                raise UserError(
                    f"reduce_fn names `{name}`, which is not a metric",
                    why=f"the metrics are {', '.join(metrics)}",
                    fix=did_you_mean(name, metrics),
                )
        return {
            name: _reduce(value, chosen.get(name), axis_name) for name, value in metrics.items()
        }

    def collect_from_devices(self, metrics: PyTree) -> PyTree:
        """Turn dim 0 of each array into a list of one host value per device.

        Call it outside compiled functions, on results whose dim 0 counts devices. Scalars stay
        as they are. With several processes, every process must call it and gets all values.
        """
        return jax.tree.map(_split_rows, metrics)

    all_gather_static = static_twin(all_gather)
    reduce_mean_static = static_twin(reduce_mean)
    reduce_sum_static = static_twin(reduce_sum)
    reduce_max_static = static_twin(reduce_max)
    reduce_min_static = static_twin(reduce_min)
    reduce_custom_static = static_twin(reduce_custom)
    collect_from_devices_static = static_twin(collect_from_devices)


def _reduce(value: PyTree, reduction: Reduction | None, axis_name: AxisName) -> PyTree:
    if callable(reduction):
        gathered = DistributedMetrics.all_gather_static(value, axis_name)
        return _map_arrays(reduction, gathered)
    named = {
        "mean": DistributedMetrics.reduce_mean_static,
        "sum": DistributedMetrics.reduce_sum_static,
        "max": DistributedMetrics.reduce_max_static,
        "min": DistributedMetrics.reduce_min_static,
    }
    operation = named.get(reduction or "mean")
    if operation is None:
        raise UserError(
            f"Unsupported reduction: {reduction!r}",
            fix=f"write one of {', '.join(named)}, or pass a function",
        )
    return operation(value, axis_name)


def _map_arrays(function: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    def apply(leaf: Any) -> Any:
        is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, np.generic)
        return leaf if is_number else function(jnp.asarray(leaf))

    return jax.tree.map(apply, tree)


def _gather(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    # Under check_vma the result must be marked as equal on all devices; elsewhere it cannot be.
    tracked = all(tracks_varying(axis) for axis in axes)
    return jax.lax.all_gather(leaf, axes, to="invarying" if tracked else "varying")


def _weighted_mean(leaf: jax.Array, weights: Weights, axes: tuple[str, ...]) -> jax.Array:
    # Token counts overflow 16-bit floats, so totals have at least 32 bits.
    dtype = jnp.promote_types(leaf.dtype, jnp.float32)
    weight = jnp.broadcast_to(jnp.asarray(weights, dtype), leaf.shape)
    # A device without samples may hold NaN, and 0 × NaN is NaN.
    weighted = jnp.where(weight == 0, 0, weight * leaf)
    return jax.lax.psum(weighted, axes) / jax.lax.psum(weight, axes)


def _split_rows(leaf: Any) -> Any:
    if np.ndim(leaf) == 0:
        return leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        from jax.experimental import multihost_utils

        return list(multihost_utils.process_allgather(leaf, tiled=True))
    return list(np.asarray(leaf))
