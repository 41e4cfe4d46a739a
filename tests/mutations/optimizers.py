"""The optimizer: its counters, moments, masks and precision."""

import jax.numpy as jnp
import optax
from mutations.mutation import Mutation
from mutations.proofs_of import FSDP_BF16, FSDP_PLAIN, Verify
from mutations.sabotage import new_parameters, optimizer_leaves, replace
from proof.proofs import Plain

from meshwright.proof import run
from meshwright.step import optimizer

MASKED = Verify(
    "fsdp=2",
    Plain,
    options={
        "optimizer": optax.adamw(
            1e-2,
            weight_decay=0.1,
            mask=lambda params: {
                layer: {name: name == "kernel" for name in leaves}
                for layer, leaves in params.items()
            },
        )
    },
)
SCHEDULED = Verify(
    "data=2", Plain, options={"optimizer": optax.sgd(optax.linear_schedule(0.1, 0.0, 10))}
)


def _other(make):
    """Let the mesh train with another optimizer."""
    return replace(
        run,
        "recording_gradients",
        lambda right: lambda optimizer, masks=None: right(make(optimizer), masks),
    )


def _one_leaf_kept(right):
    def update(self, gradients, leaves, params, objective=None, **settings):
        changed, after = right(self, gradients, leaves, params, objective, **settings)
        number = [leaf.path for leaf in self.leaves].index("1.0.mu.up.kernel")
        return changed, [*after[:number], leaves[number], *after[number + 1 :]]

    return update


def _coarse(leaf):
    """Lose half of the bits of a float32 number."""
    return leaf.astype(jnp.bfloat16).astype(leaf.dtype) if leaf.dtype == jnp.float32 else leaf


def _coarse_moments(right):
    def update(self, gradients, leaves, params, objective=None, **settings):
        changed, after = right(self, gradients, leaves, params, objective, **settings)
        return changed, [
            leaf if described.path.startswith("0.gradients.") else _coarse(leaf)
            for described, leaf in zip(self.leaves, after, strict=True)
        ]

    return update


def _coarse_gradients(right):
    def update(self, gradients, *rest, **settings):
        return right(self, [_coarse(g) for g in gradients], *rest, **settings)

    return update


MUTATIONS = (
    Mutation(
        "the bias correction is one step ahead",
        optimizer_leaves(".count", lambda count: count + 1),
        FSDP_PLAIN,
        ("float64 parameters", "own_precision parameters"),
        names="down.bias",
    ),
    Mutation(
        "the optimizer's counter is reset in every step",
        optimizer_leaves(".count", jnp.zeros_like),
        FSDP_PLAIN,
        ("float64 parameters", "own_precision parameters"),
        names="down.bias",
    ),
    Mutation(
        "the learning rate schedule advances once per device",
        optimizer_leaves(".count", lambda count: 2 * count),
        SCHEDULED,
        ("float64 parameters", "own_precision parameters"),
        seen="schedulers stepped by every process",
        names="down.bias",
    ),
    Mutation(
        "epsilon is lost in a cast",
        _other(lambda _: optax.adamw(1e-3, eps=0.0)),
        FSDP_PLAIN,
        ("float64 parameters",),
        seen="1e-8 is zero in float16",
    ),
    Mutation(
        "weight decay is applied to masked leaves",
        _other(lambda _: optax.adamw(1e-2, weight_decay=0.1)),
        MASKED,
        ("float64 parameters", "own_precision parameters"),
    ),
    Mutation(
        "weight decay is missing",
        _other(lambda _: optax.adam(1e-2)),
        MASKED,
        ("own_precision parameters", "float64 parameters"),
        names="down.kernel",
    ),
    Mutation(
        "a moment of one leaf is never updated",
        replace(optimizer.FlatOptimizer, "update", _one_leaf_kept),
        FSDP_PLAIN,
        ("float64 parameters", "own_precision parameters"),
        names="up.kernel",
        everyday=True,
    ),
    Mutation(
        "moments are stored in bfloat16",
        replace(optimizer.FlatOptimizer, "update", _coarse_moments),
        FSDP_PLAIN,
        ("own_precision parameters",),
        names="down.bias",
        only=True,
    ),
    Mutation(
        "parameters are stored in bfloat16",
        new_parameters(lambda path, before, after: _coarse(after)),
        FSDP_BF16,
        ("own_precision parameters",),
        seen="half precision without float32 master weights",
        names="down.bias",
    ),
    Mutation(
        "gradients are cast to bfloat16 before the optimizer",
        replace(optimizer.FlatOptimizer, "update", _coarse_gradients),
        FSDP_PLAIN,
        ("own_precision gradients",),
    ),
)
