"""`shard_fsdp`: shards the arrays of a pytree over a mesh axis, for custom training loops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from meshwright.config.argument_checks import check_kind, wrong_kind
from meshwright.config.schema import ShardingConfig
from meshwright.mesh.axes import entry_names
from meshwright.mesh.build import check_mesh_axis
from meshwright.program.trace.model_leaves import Leaf
from meshwright.sharding.placement import DimAxes, Placement, add_fsdp, to_spec
from meshwright.trees import PyTree

_MIN_SHARD_SIZE = ShardingConfig().min_shard_size


def shard_fsdp(
    params: PyTree, mesh: Mesh, *, axis_name: str = "fsdp", min_shard_size: int = _MIN_SHARD_SIZE
) -> PyTree:
    """Return the tree with each array sharded over an axis, so that each device holds 1/N of it.

    Each array is sharded on its largest divisible dim; arrays without one, and small arrays, are
    replicated. Axes that already shard an array on this mesh continue to do so.

    Args:
        params: any pytree of arrays, an `nnx.State`, an NNX model or a dict of them. Optimizer
            state is sharded like its parameters.
        mesh: the mesh.
        axis_name: the mesh axis to shard over.
        min_shard_size: arrays with fewer elements are not sharded.
    """
    check_kind("mesh", mesh, Mesh, 'write a mesh, such as mw.build_mesh({"fsdp": 8})')
    check_kind("axis_name", axis_name, str, 'write the name of an axis, such as "fsdp"')
    check_kind("min_shard_size", min_shard_size, int, "write a number of elements, 0 or more")
    check_mesh_axis(mesh, axis_name, "name one of them with axis_name=")

    def put(leaf: Any) -> Any:
        fix = "give arrays, a pytree of arrays, or a model"
        if isinstance(leaf, str | bytes):
            # JAX would take it for the name of a dtype.
            raise wrong_kind("params", leaf, fix)
        try:
            return jax.device_put(leaf, fsdp_sharding(leaf, mesh, axis_name, min_shard_size))
        except (TypeError, ValueError, OverflowError):
            raise wrong_kind("params", leaf, fix) from None

    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Pytree)

    if not any(map(is_module, jax.tree.leaves(params, is_leaf=is_module))):
        return jax.tree.map(put, params)
    # Mapped as a tree, a model would lose its sharing: tied weights would become two arrays.
    graph, state = nnx.split(params)
    return nnx.merge(graph, jax.tree.map(put, state))


def fsdp_sharding(leaf: Any, mesh: Mesh, axis: str, smallest: int) -> NamedSharding:
    """Return the sharding of an array that has an axis besides those that it has already."""
    as_leaf = Leaf("", tuple(np.shape(leaf)), jnp.result_type(leaf), "param", "array")
    before = _other_axes(leaf, mesh, axis)
    placed = Placement("", tuple(before))
    after = add_fsdp(as_leaf, placed, size=mesh.shape[axis], smallest=smallest).dims
    # `add_fsdp` always names the axis fsdp.
    dims = [old if new == old else (axis,) for old, new in zip(before, after, strict=True)]
    return NamedSharding(mesh, to_spec(dims))


def _other_axes(leaf: Any, mesh: Mesh, axis: str) -> list[DimAxes]:
    """Return the axes other than ``axis`` that already shard each dim of an array."""
    sharding = getattr(leaf, "sharding", None)
    ndim = np.ndim(leaf)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
        return [()] * ndim
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    return [tuple(n for n in entry_names(entry) if n != axis) for entry in entries]
