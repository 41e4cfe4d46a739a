"""Wrong reductions: sums for means, the wrong axis, a reduction that is missing."""

import dataclasses

import jax
import jax.numpy as jnp
from mutations.mutation import Mutation
from mutations.proofs_of import (
    DATA_BF16,
    DATA_FSDP_LOCAL,
    DATA_LOCAL,
    DATA_PLAIN,
    DATA_TENSOR,
    FSDP,
    FSDP_BF16,
    FSDP_PLAIN,
    LEDGER,
    LEDGER_TOKENS,
    LEDGERS_GROWN,
    TENSOR,
)
from mutations.sabotage import equation, gradient_values, gradients, replace

from meshwright.program.evaluate.weight_uses import Weights
from meshwright.program.on_mesh import products
from meshwright.sharding import decide
from meshwright.step import gradients as local

PARAMS = ["down.bias", "down.kernel", "norm.bias", "norm.scale", "up.bias", "up.kernel"]
"""The trained leaves of `proof.proofs.Net`, in the order of the step."""


def _samples_of_first(batch, devices=2):
    """Return a batch in which the samples of the first device stand for those of all."""
    return [
        jnp.tile(leaf[: leaf.shape[0] // devices], (devices,) + (1,) * (leaf.ndim - 1))
        for leaf in batch
    ]


def _one_leaf_not_reduced(found, right, function, params, state, batch, scale):
    own = right(function, params, state, _samples_of_first(batch), scale)
    number = PARAMS.index("norm.scale")
    values = [own.values[n] if n == number else g for n, g in enumerate(found.values)]
    return dataclasses.replace(found, values=values)


def _replica_left_out(found, right, function, params, state, batch, scale):
    weight, *rest = batch
    left = right(function, params, state, [weight.at[:2].set(0), *rest], scale)
    return dataclasses.replace(found, values=left.values)


def _loss_of_first(found, right, function, params, state, batch, scale):
    own = right(function, params, state, _samples_of_first(batch, 4), scale)
    return dataclasses.replace(found, loss=own.loss)


def _swap_two(found, *_):
    values = list(found.values)
    values[2], values[3] = values[3], values[2]
    return dataclasses.replace(found, values=values)


def _half_the_positions(run, x, scale):
    """Scale as always; the gradient of the scale is that of the first positions only."""
    half = x.shape[1] // 2
    (whole,) = run(x, scale)
    (still,) = run(x, jax.lax.stop_gradient(scale))
    return [jnp.concatenate([whole[:, :half], still[:, half:]], axis=1)]


def _divided_again(right):
    def prepare(weights, value, use):
        used = right(weights, value, use)
        return used / 2 + jax.lax.stop_gradient(used / 2)

    return prepare


def _gradient_as_it_is(right):
    """Gather weights as always; their gradients get no layout."""

    def prepare(weights, value, use):
        def gather(weight):
            return right(weights, weight, dataclasses.replace(use, trained=False))

        prepared = jax.custom_vjp(gather)
        prepared.defvjp(lambda weight: (gather(weight), None), lambda _, cotangent: (cotangent,))
        return prepared(value) if use.trained else gather(value)

    return prepare


_no_activation_is_pinned = replace(
    decide, "find_constraints", lambda right: lambda *arguments, **options: {}
)


def _nothing_is_pinned(patch):
    _no_activation_is_pinned(patch)
    replace(Weights, "prepare", lambda right: lambda weights, value, *_: value)(patch)


MUTATIONS = (
    Mutation(
        "gradients are summed over data instead of averaged",
        gradient_values(lambda g: 4 * g),
        DATA_PLAIN,
        ("float64 gradients", "float64 metrics", "own_precision gradients"),
        names="down.bias",
    ),
    Mutation(
        "gradients are averaged over tensor as well as over data",
        gradient_values(lambda g: g / 2),
        DATA_TENSOR,
        ("float64 gradients", "own_precision gradients"),
        seen="gradients divided by all devices instead of by the replicas",
        names="down.bias",
    ),
    Mutation(
        "gradients that each device adds up are never reduced",
        replace(local.jax.lax, "psum", lambda right: lambda value, axes: value),
        DATA_LOCAL,
        ("float64 gradients", "float64 loss", "float64 parameters"),
        seen="accumulation without synchronization that is never switched on again",
        names="down.bias",
    ),
    Mutation(
        "the same, in the compiled program",
        replace(local.jax.lax, "psum", lambda right: lambda value, axes: value),
        LEDGER,
        ("data below the minimum",),
        names="data",
    ),
    Mutation(
        "gradients are reduced over data and not over fsdp",
        replace(local.jax.lax, "psum", lambda right: lambda value, axes: right(value, axes[:1])),
        DATA_FSDP_LOCAL,
        ("float64 gradients", "float64 loss"),
        names="down.bias",
    ),
    Mutation(
        "one replicated leaf is not reduced over fsdp",
        gradients(_one_leaf_not_reduced),
        FSDP,
        ("float64 gradients", "float64 parameters", "own_precision gradients"),
        seen="leaves too small to be sharded",
        names="norm.scale",
    ),
    Mutation(
        "a norm's gradient is that of one part of the sequence",
        equation(
            "mul",
            "blocks.0.norm",
            lambda run, x, scale: (
                _half_the_positions(run, x, scale) if scale.shape[0] == 1 else run(x, scale)
            ),
        ),
        TENSOR,
        ("float64 gradients", "own_precision gradients"),
        seen="sequence parallelism, where norms are replicated and their inputs are not",
        names="blocks.0.norm.scale",
    ),
    Mutation(
        "gradients of gathered weights are divided by the devices once more",
        replace(Weights, "prepare", _divided_again),
        FSDP_PLAIN,
        ("float64 gradients", "own_precision gradients"),
        seen="averaging in ZeRO's reduce-scatter",
        names="down.bias",
        everyday=True,
    ),
    Mutation(
        "gradients of gathered weights get no layout, and the compiler chooses one",
        replace(Weights, "prepare", _gradient_as_it_is),
        LEDGER_TOKENS,
        ("fsdp above the minimum",),
        names="fsdp",
    ),
    Mutation(
        "activations get no layout, and the compiler chooses one",
        _no_activation_is_pinned,
        LEDGERS_GROWN,
        ("more sent over tensor",),
        names="tensor",
    ),
    Mutation(
        "neither activations nor gathered weights get a layout",
        _nothing_is_pinned,
        LEDGER_TOKENS,
        ("fsdp above the minimum",),
        seen="parameters that are sharded in programs that are left to the compiler",
        names="fsdp",
    ),
    Mutation(
        "one of eight replicas is left out, in bfloat16",
        gradients(_replica_left_out),
        DATA_BF16,
        ("own_precision gradients", "float64 gradients"),
        names="down.bias",
    ),
    Mutation(
        "weight gradients are wrong by a tenth in half precision alone",
        replace(products, "_weight_gradient", lambda right: lambda *a, **k: 0.9 * right(*a, **k)),
        FSDP_BF16,
        ("own_precision gradients",),
        names="down.kernel",
        only=True,
    ),
    Mutation(
        "the gradients of two leaves of the same shape are swapped",
        gradients(_swap_two),
        FSDP,
        ("float64 gradients", "float64 parameters"),
        names="norm.bias",
    ),
    Mutation(
        "the reported loss is that of one device's samples",
        gradients(_loss_of_first),
        DATA_PLAIN,
        ("float64 loss", "own_precision loss"),
        seen="logging on the main process without a reduction",
        names="step 1",
    ),
)
