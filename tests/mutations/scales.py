"""Missing and repeated factors: accumulation, weights of microbatches, loss scale, clipping."""

import dataclasses

import jax.numpy as jnp
from mutations.mutation import Mutation
from mutations.proofs_of import DATA_ACCUMULATED, FSDP_ACCUMULATED, FSDP_CLIPPED, FSDP_FP16
from mutations.sabotage import replace

from meshwright.step import gradients as gradients_module
from meshwright.step import train_step


def _unweighted(right):
    def accumulate(function, *rest):
        def mean(*arguments):
            value = function(*arguments)
            one = jnp.ones_like(value.objective.weight)
            objective = dataclasses.replace(value.objective, total=value.objective.mean, weight=one)
            return dataclasses.replace(value, objective=objective)

        return right(mean, *rest)

    return accumulate


def _times(factor):
    def make(right):
        def finish(params, sums, *rest):
            return right(params, [factor * s for s in sums], *rest)

        return finish

    return replace(gradients_module, "finish_gradients", make)


def _last_only(right):
    """Only the last microbatch's gradient survives; the losses are right."""

    def accumulate(function, params, state, microbatches, *rest):
        found = right(function, params, state, microbatches, *rest)
        last = right(function, params, state, [m[-1:] for m in microbatches], *rest)
        return dataclasses.replace(found, values=last.values)

    return accumulate


def _norm_of_a_part(right):
    """Return the norm of what one of four devices holds."""

    def norm(values):
        return right([v[: -(-v.shape[0] // 4)] for v in values])

    return norm


def _counted_four_times(right):
    """Return a norm to which leaves that every device holds contribute once per device."""

    def norm(values):
        return right([v * (2.0 if v.ndim == 1 else 1.0) for v in values])

    return norm


def _each_by_itself(right):
    def clip(self, values, norm):
        del norm
        return [right(self, [v], jnp.linalg.norm(v.ravel()))[0] for v in values]

    return clip


def _clip_afterwards(patch):
    """Let the optimizer see the gradients as they are, and shrink its update instead."""
    right = train_step.TrainStep._clip
    replace(train_step.TrainStep, "_clip", lambda _: lambda self, values, norm: values)(patch)

    def make(update):
        def broken(self, state, batch):
            after, metrics = update(self, state, batch)
            norm = metrics["grad_norm"]
            moved = [new - old for new, old in zip(after.params, state.params, strict=True)]
            moved = right(self, moved, norm)
            params = [old + move for old, move in zip(state.params, moved, strict=True)]
            return dataclasses.replace(after, params=params), metrics

        return broken

    replace(train_step.TrainStep, "_update", make)(patch)


def _norm_of_scaled(right):
    """Clip before the loss scale is removed: the norm is far too large."""

    def clip(self, values, norm):
        return right(self, values, norm * 2.0**15)

    return clip


MUTATIONS = (
    Mutation(
        "accumulated gradients are divided by the microbatches twice",
        _times(0.25),
        FSDP_ACCUMULATED,
        ("float64 gradients", "own_precision gradients"),
        seen="a loss that is divided by the accumulation steps and normalized again",
        names="down.bias",
    ),
    Mutation(
        "accumulated gradients are never divided",
        _times(4.0),
        FSDP_ACCUMULATED,
        ("float64 gradients", "own_precision gradients"),
        seen="a loss that is not divided by the accumulation steps",
        names="down.bias",
    ),
    Mutation(
        "microbatches count the same although their weights differ",
        replace(train_step, "accumulate_gradients", _unweighted),
        FSDP_ACCUMULATED,
        ("float64 gradients", "float64 loss"),
        seen="token means averaged over microbatches with different numbers of tokens",
        names="down.bias",
    ),
    Mutation(
        "only the last microbatch's gradient survives",
        replace(train_step, "accumulate_gradients", _last_only),
        DATA_ACCUMULATED,
        ("float64 gradients", "float64 parameters"),
        seen="an accumulator that is reset at every backward pass",
        names="down.bias",
    ),
    Mutation(
        "the loss scale of float16 is not removed",
        replace(gradients_module, "_unscale", lambda right: lambda values, scale: list(values)),
        FSDP_FP16,
        ("float64 gradients", "own_precision gradients"),
        seen="gradients read before they are unscaled",
    ),
    Mutation(
        "gradients are clipped before the loss scale is removed",
        replace(train_step.TrainStep, "_clip", _norm_of_scaled),
        FSDP_FP16,
        ("float64 gradients", "own_precision gradients"),
        seen="clipping of scaled gradients",
    ),
    Mutation(
        "gradients are clipped by the norm of one device's shards",
        replace(train_step.optax.tree, "norm", _norm_of_a_part),
        FSDP_CLIPPED,
        ("float64 metrics", "float64 parameters"),
        seen="norms over sharded parameters that are not reduced",
        names="grad_norm",
    ),
    Mutation(
        "the norm counts replicated leaves once per device",
        replace(train_step.optax.tree, "norm", _counted_four_times),
        FSDP_CLIPPED,
        ("float64 metrics", "float64 parameters"),
        seen="norms of replicated parameters that are reduced all the same",
        names="grad_norm",
    ),
    Mutation(
        "each leaf is clipped by its own norm",
        replace(train_step.TrainStep, "_clip", _each_by_itself),
        FSDP_CLIPPED,
        ("float64 gradients", "own_precision gradients"),
    ),
    Mutation(
        "the update is clipped instead of the gradients",
        _clip_afterwards,
        FSDP_CLIPPED,
        ("float64 gradients", "float64 parameters"),
    ),
)
