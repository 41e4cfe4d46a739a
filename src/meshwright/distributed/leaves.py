"""Putting the leaves of a pytree on a mesh, from one process or several."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright.errors import UserError
from meshwright.mesh.axes import entry_names
from meshwright.trees import PyTree, is_key

Leaf = Any
"""A leaf of a pytree: an array of JAX or NumPy, or a Python number."""


def place(tree: PyTree, sharding: Sharding) -> PyTree:
    """Put every leaf on the devices of ``sharding``; scalars are replicated.

    With several processes, each passes its own part of the batch; the result is the global array.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(tree, sharding)
    return place_parts(tree, lambda name, leaf: fit_sharding(name, leaf, sharding))


def place_parts(tree: PyTree, choose: Callable[[str, Leaf], NamedSharding]) -> PyTree:
    """Place leaves of which each process holds a part, sharded by ``choose(name, leaf)``."""

    def put(path: Any, leaf: Leaf) -> jax.Array:
        sharding = choose(jax.tree_util.keystr(path) or "the array", leaf)
        return _put_leaf(leaf, sharding, whole=False)

    return jax.tree_util.tree_map_with_path(put, tree)


def place_whole(tree: PyTree, choose: Callable[[Leaf], NamedSharding]) -> PyTree:
    """Place leaves that each process holds in full, sharded by ``choose(leaf)``."""
    return jax.tree.map(lambda leaf: _put_leaf(leaf, choose(leaf), whole=True), tree)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Put a full copy of every leaf on every device of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return place_whole(tree, lambda _: sharding)


def fit_sharding(name: str, leaf: Leaf, sharding: NamedSharding) -> NamedSharding:
    """Return ``sharding`` limited to the leaf's dims, which it must shard evenly."""
    shape = np.shape(leaf)
    entries = tuple(sharding.spec)
    if not shape:
        entries = ()
    elif any(entry is not None for entry in entries[len(shape) :]):
        raise UserError(
            f"{name} has too few dims to be sharded",
            why=f"its shape is {shape}, but {sharding.spec} shards dim {len(entries) - 1}",
            fix="place this leaf separately, with its own sharding",
        )
    fitted = NamedSharding(
        sharding.mesh, PartitionSpec(*entries[: len(shape)]), memory_kind=sharding.memory_kind
    )
    if not is_global(leaf):
        _check_divides(name, shape, fitted)
    return fitted


def is_global(leaf: Leaf) -> bool:
    """Whether the leaf is already a global array over the devices of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _check_divides(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    for dim, (size, parts) in enumerate(zip(shape, _parts_here(sharding), strict=False)):
        if size % parts == 0:
            continue
        down, up = size // parts * parts, math.ceil(size / parts) * parts
        where = "" if jax.process_count() == 1 else " of this process"
        raise UserError(
            f"{name} cannot be split evenly",
            why=f"{sharding.spec} splits dim {dim} of size {size} over {parts} devices{where}, and "
            f"{size} is not divisible by {parts}",
            fix=f"use a size of {up}" if down == 0 else f"use a size of {down} or {up}",
        )


def _parts_here(sharding: NamedSharding) -> list[int]:
    """Return, for each dim of the spec, the number of parts on this process's devices."""
    shape = sharding.mesh.shape
    sizes = [math.prod(shape[name] for name in entry_names(entry)) for entry in sharding.spec]
    if jax.process_count() == 1:
        return sizes
    # For a shape of one row per part, the rows of this process are its parts.
    indices = sharding.addressable_devices_indices_map(tuple(sizes)).values()
    return [
        len({index[dim].indices(size)[0] for index in indices if index is not None})
        for dim, size in enumerate(sizes)
    ]


def _put_leaf(leaf: Leaf, sharding: NamedSharding, *, whole: bool) -> jax.Array:
    if jax.process_count() == 1 or is_global(leaf):
        return jax.device_put(leaf, sharding)
    if is_key(jnp.result_type(leaf)):
        data = _put_leaf(jax.random.key_data(leaf), sharding, whole=whole)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # jnp.asarray converts 64-bit host data to the dtype it has on a device.
    data = np.asarray(jnp.asarray(leaf))
    return jax.make_array_from_process_local_data(sharding, data, data.shape if whole else None)
