"""Off-by-one accumulation: microbatches that are dropped, used twice, or cut elsewhere."""

import jax.numpy as jnp
from mutations.mutation import Mutation
from mutations.proofs_of import DATA_ACCUMULATED
from mutations.sabotage import replace

from meshwright.step import train_step


def _last_dropped(right):
    return lambda *arguments: [leaf[:-1] for leaf in right(*arguments)]


def _first_twice(right):
    def split(*arguments):
        return [jnp.concatenate([leaf[:1], leaf[:-1]]) for leaf in right(*arguments)]

    return split


def _contiguous(right):
    del right
    return lambda batch, count, *_: [a.reshape(count, -1, *a.shape[1:]) for a in batch]


def _one_leaf_shifted(right):
    """The last array of a batch is one microbatch ahead of the others."""

    def split(*arguments):
        *leaves, last = right(*arguments)
        return [*leaves, jnp.roll(last, 1, axis=0)]

    return split


def _mutation(does, make, *, seen="", everyday=False):
    return Mutation(
        does,
        replace(train_step, "split_strided", make),
        DATA_ACCUMULATED,
        ("float64 loss", "float64 gradients", "own_precision gradients"),
        names="step 1",
        seen=seen,
        everyday=everyday,
    )


MUTATIONS = (
    _mutation("the last microbatch is dropped", _last_dropped, seen="incomplete windows"),
    _mutation("the first microbatch is used twice and the last never", _first_twice),
    _mutation("microbatches are contiguous instead of strided", _contiguous),
    _mutation("inputs and targets are from different microbatches", _one_leaf_shifted),
)
