"""Putting the leaves of a tree on a mesh, from one process or from several."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshwright.errors import UserError, did_you_mean
from meshwright.trees import is_key


def place(tree: Any, sharding: Sharding) -> Any:
    """Put every leaf on the devices of ``sharding``; scalars are replicated.

    With several processes each passes its own part of the batch, and the result is the global
    array they form together.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(tree, sharding)
    return place_parts(tree, lambda name, leaf: fit_sharding(name, leaf, sharding))


def place_parts(tree: Any, choose: Callable[[str, Any], NamedSharding]) -> Any:
    """Put every leaf, of which each process holds its part, where ``choose(name, leaf)`` says."""

    def put(path: Any, leaf: Any) -> Any:
        sharding = choose(jax.tree_util.keystr(path) or "the array", leaf)
        return _put_leaf(leaf, sharding, whole=False)

    return jax.tree_util.tree_map_with_path(put, tree)


def place_whole(tree: Any, choose: Callable[[Any], NamedSharding]) -> Any:
    """Put every leaf, which each process holds in full, where ``choose(leaf)`` says."""
    return jax.tree.map(lambda leaf: _put_leaf(leaf, choose(leaf), whole=True), tree)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Put a full copy of every leaf on every device of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return place_whole(tree, lambda _: sharding)


def fit_sharding(name: str, leaf: Any, sharding: NamedSharding) -> NamedSharding:
    """Return ``sharding`` cut to the leaf's dims, after checking that it divides them."""
    shape = np.shape(leaf)
    entries = tuple(sharding.spec)
    if not shape:
        entries = ()
    elif any(entry is not None for entry in entries[len(shape) :]):
        raise UserError(
            f"{name} has too few dims to be sharded",
            why=f"its shape is {shape}, and the sharding names dim {len(entries) - 1}: "
            f"{sharding.spec}",
            fix="give this leaf a sharding of its own",
        )
    fitted = NamedSharding(
        sharding.mesh, PartitionSpec(*entries[: len(shape)]), memory_kind=sharding.memory_kind
    )
    if not is_global(leaf):
        _check_divides(name, shape, fitted)
    return fitted


def check_mesh_axis(mesh: Mesh, axis: str) -> None:
    """Refuse an axis name that the mesh does not have."""
    if axis not in mesh.axis_names:
        raise UserError(
            f"the mesh has no axis `{axis}`",
            why=f"its axes are {', '.join(map(str, mesh.axis_names))}",
            fix=did_you_mean(axis, [str(name) for name in mesh.axis_names]),
        )


def is_global(leaf: Any) -> bool:
    """Whether the leaf is already one array over the devices of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _check_divides(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    for dim, (size, parts) in enumerate(zip(shape, _parts_here(sharding), strict=False)):
        if size % parts == 0:
            continue
        down, up = size // parts * parts, math.ceil(size / parts) * parts
        where = "" if jax.process_count() == 1 else " of this process"
        raise UserError(
            f"{name} cannot be split evenly",
            why=f"dim {dim} has size {size}, the sharding {sharding.spec} splits it over {parts} "
            f"devices{where}, and {size} is not divisible by {parts}",
            fix=f"use a size of {up}" if down == 0 else f"use a size of {down} or {up}",
        )


def _parts_here(sharding: NamedSharding) -> list[int]:
    """Return, per dim of the spec, into how many parts this process's devices split it."""
    sizes = [_axes_size(sharding.mesh, entry) for entry in sharding.spec]
    if jax.process_count() == 1:
        return sizes
    # With one row per part, the rows this process needs are the parts it holds.
    indices = sharding.addressable_devices_indices_map(tuple(sizes)).values()
    return [
        len({index[dim].indices(size)[0] for index in indices if index is not None})
        for dim, size in enumerate(sizes)
    ]


def _axes_size(mesh: Any, entry: Any) -> int:
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def _put_leaf(leaf: Any, sharding: NamedSharding, *, whole: bool) -> Any:
    if jax.process_count() == 1 or is_global(leaf):
        return jax.device_put(leaf, sharding)
    if is_key(jnp.result_type(leaf)):
        data = _put_leaf(jax.random.key_data(leaf), sharding, whole=whole)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # jnp.asarray first: it gives 64-bit host data the type it would have on a device.
    data = np.asarray(jnp.asarray(leaf))
    return jax.make_array_from_process_local_data(sharding, data, data.shape if whole else None)
