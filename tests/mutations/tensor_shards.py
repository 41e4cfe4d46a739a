"""Tensor parallelism: what each device computes on its part, and what is missing between them."""

from mutations.models import HEADS, VOCABULARY, WIDTH
from mutations.mutation import Mutation
from mutations.proofs_of import DATA_TENSOR, TENSOR
from mutations.sabotage import equation


def _first_partial_sum(run, x, weight):
    """Use the partial sum of the first device."""
    half = x.shape[-1] // 2
    return run(x.at[..., half:].set(0), weight)


def _once_per_shard(run, x, bias):
    return run(x, 2 * bias) if bias.shape[0] == 1 else run(x, bias)


def _heads_first(run, x, weight):
    """Read columns that are ordered by projection and head as if by head and projection."""
    shape = (weight.shape[0], 3, HEADS, WIDTH // HEADS)
    return run(x, weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape))


def _first_heads_twice(run, x, weight):
    """Let all devices have the value heads of the first one."""
    heads = weight.reshape(weight.shape[0], 3, HEADS, WIDTH // HEADS)
    return run(x, heads.at[:, 2].set(heads[:, 2, :1]).reshape(weight.shape))


def _without_offset(run, table, ids):
    """Look up ids in the rows of the first device."""
    return run(table, ids % (VOCABULARY // 2))


def _own_vocabulary(run, x):
    """Normalize by the vocabulary of the first device."""
    if x.shape[-1] != VOCABULARY or x.ndim != 3:
        return run(x)
    return run(x.at[..., VOCABULARY // 2 :].set(0))


def _mutation(does, break_it, *, check=TENSOR, seen="", everyday=False):
    return Mutation(
        does,
        break_it,
        check,
        ("float64 loss", "float64 gradients", "own_precision gradients"),
        names="step 1",
        seen=seen,
        everyday=everyday,
    )


MUTATIONS = (
    _mutation(
        "partial sums of tensor devices are not added",
        equation("dot_general", "down", _first_partial_sum),
        check=DATA_TENSOR,
    ),
    _mutation(
        "a bias is added once per tensor device",
        equation("add", "blocks.0.down", _once_per_shard),
        seen="biases of row-parallel layers",
    ),
    _mutation(
        "a fused projection is divided at the wrong heads",
        equation("dot_general", "blocks.0.qkv", _heads_first),
        seen="fused projections that are sharded like plain ones",
    ),
    _mutation(
        "tensor devices have the same value heads",
        equation("dot_general", "blocks.0.qkv", _first_heads_twice),
    ),
    _mutation(
        "a divided embedding is looked up without the offset",
        equation("gather", "embed", _without_offset),
    ),
    _mutation(
        "the softmax is over one device's part of the vocabulary",
        equation("reduce_sum", "", _own_vocabulary),
    ),
)
