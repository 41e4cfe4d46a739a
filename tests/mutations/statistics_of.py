"""Local statistics: batch normalization and metrics of one device's samples."""

import dataclasses

import jax
import jax.numpy as jnp
from mutations.mutation import Mutation
from mutations.proofs_of import DATA, FSDP_TOKENS
from mutations.reductions import _samples_of_first
from mutations.sabotage import gradients, replace

from meshwright import Weighted
from meshwright.step import step_program


def _device_by_device(right):
    """Trace a loss in which each device normalizes by its own samples."""

    def trace(loss, *rest):
        def alone(model, batch):
            half = batch["x"].shape[0] // 2
            parts = [
                loss(model, {name: a[start : start + half] for name, a in batch.items()})
                for start in (0, half)
            ]
            return Weighted(*map(sum, zip(*((p.total, p.weight) for p in parts), strict=True)))

        return right(alone, *rest)

    return trace


def _statistics_of_first(found, right, function, params, state, batch, scale):
    own = right(function, params, state, _samples_of_first(batch), scale)
    return dataclasses.replace(found, model_state=own.model_state)


def _metrics_of_first(found, right, function, params, state, batch, scale):
    own = right(function, params, state, _samples_of_first(batch), scale)
    return dataclasses.replace(found, metrics=own.metrics)


def _means_of_means(found, right, function, params, state, batch, scale):
    """Average the metrics of devices although their weights differ."""
    other = [jnp.roll(leaf, leaf.shape[0] // 2, axis=0) for leaf in batch]
    parts = [
        right(function, params, state, _samples_of_first(half), scale) for half in (batch, other)
    ]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, parts[0].metrics, parts[1].metrics)
    return dataclasses.replace(found, metrics=mean)


MUTATIONS = (
    Mutation(
        "batch normalization uses each device's own samples",
        replace(step_program, "trace_loss", _device_by_device),
        DATA,
        ("float64 loss", "float64 gradients", "float64 state", "own_precision gradients"),
        seen="data parallelism without synchronized batch normalization",
        names="step 1",
    ),
    Mutation(
        "running statistics are those of one device's samples",
        gradients(_statistics_of_first),
        DATA,
        ("float64 state", "own_precision state"),
        seen="running statistics that are only broadcast",
        names="norm.mean",
        only=True,
    ),
    Mutation(
        "metrics are those of one device's samples",
        gradients(_metrics_of_first),
        FSDP_TOKENS,
        ("float64 metrics",),
        seen="metrics that are not reduced",
        names="accuracy",
        only=True,
    ),
    Mutation(
        "metrics of devices are averaged although their weights differ",
        gradients(_means_of_means),
        FSDP_TOKENS,
        ("float64 metrics",),
        seen="means of means",
        names="accuracy",
    ),
)
