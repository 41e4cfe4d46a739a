"""Trees of arrays: their types, random keys, and the samples of a batch."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import UserError

PyTree = Any
"""Arrays, nested in any way that `jax.tree` handles."""

TreeDef = Any
"""The structure of a pytree; JAX's own type cannot be used in annotations."""

Batch = Any
"""A pytree of arrays, or of their shapes, whose dim 0 counts samples."""


def is_key(value: Any) -> bool:
    """Whether an array, or a dtype, holds typed random keys rather than numbers."""
    return jnp.issubdtype(getattr(value, "dtype", value), jax.dtypes.prng_key)


def key_data(value: Any) -> Any:
    """Return the words of random keys as numbers; any other array unchanged."""
    return jax.random.key_data(value) if is_key(value) else value


def from_key_data(value: Any, dtype: Any) -> Any:
    """Return what `key_data` made of an array of this dtype as it was; other arrays unchanged."""
    if not is_key(dtype):
        return value
    # The dtype of a key knows its generator, which need not be the default one.
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(jnp.empty((0,), dtype)))


def bytes_on_device(tree: PyTree) -> int:
    """Return the bytes that a device has of arrays, or of their shapes."""
    return sum(
        math.prod(a.shape if a.sharding is None else a.sharding.shard_shape(a.shape))
        * a.dtype.itemsize
        for a in jax.tree.leaves(tree)
    )


def placed_struct(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array with how devices should share it."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def resize_batch(batch: Batch, num_samples: int) -> Batch:
    """Return the shapes of a batch (a tree of arrays or shapes) with this many samples."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_samples, *leaf.shape[1:]), leaf.dtype), batch
    )


def divide_batch(batch: Batch, parts: int) -> Batch:
    """Return the shapes of one of ``parts`` equal parts of a batch."""
    return jax.tree.map(lambda leaf: resize_batch(leaf, leaf.shape[0] // parts), batch)


def check_num_samples(sizes: Mapping[str, int], name: str) -> int:
    """Return how many samples arrays have in dim 0, which must be the same for all of them.

    Their sizes are by name of the array; ``name`` is what they belong to, such as ``the batch``.
    """
    if len(set(sizes.values())) > 1:
        raise UserError(
            f"the arrays of {name} have different numbers of samples",
            why=", ".join(f"{array}: {size}" for array, size in sizes.items()),
            fix="make dim 0 of every array the sample",
        )
    (count,) = set(sizes.values())
    if not count:
        raise UserError(
            f"{name} has no samples", why="dim 0 of its arrays is 0", fix="give at least one sample"
        )
    return count


_TOKENS = {"tokens": 1, "inputs": 0, "input_ids": 0}
"""Names of token arrays, and how many tokens of a row the model does not read: the last target."""


def tokens_per_sample(batch: Any) -> int | None:
    """Return the tokens per sample of a language-modeling batch; None for other batches.

    They are those of an array with a name for tokens, or of the only array that looks like one.
    """
    if isinstance(batch, Mapping):
        for name, beyond in _TOKENS.items():
            if _holds_rows(batch.get(name)):
                return int(batch[name].shape[1]) - beyond
    rows = [leaf for leaf in jax.tree.leaves(batch) if _holds_rows(leaf)]
    # Single bytes may as well be pixels, and single columns classes.
    if len(rows) != 1 or rows[0].dtype.itemsize == 1 or rows[0].shape[1] == 1:
        return None
    return int(rows[0].shape[1])


def _holds_rows(array: Any) -> bool:
    """Whether this is an array of integers, samples × positions."""
    # Anything else in a batch, such as a tree, has no tokens to count.
    shape, dtype = getattr(array, "shape", ()), getattr(array, "dtype", None)
    return len(shape) == 2 and dtype is not None and jnp.issubdtype(dtype, jnp.integer)
