"""DataParallel: sharded batches, replicated or sharded state, and averaged gradients."""

import math
from typing import Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.distributed.argument_forms import (
    DEFAULT_AXIS,
    AxisName,
    also_called,
    require_axes,
    resolve_axes,
    static_twin,
    tracks_varying,
    varying_axes,
)
from meshwright.distributed.leaves import Leaf, place, place_whole, replicate
from meshwright.errors import UserError
from meshwright.mesh.axes import BATCH_AXES
from meshwright.mesh.build import check_mesh_axis
from meshwright.trees import Batch, PyTree


class DataParallel(nnx.Module):
    """Data parallelism on a mesh: every device holds the model and a part of the batch."""

    def create_data_parallel_sharding(
        self, mesh: Mesh, data_axis: str = "data", *, axis_name: str | None = None
    ) -> NamedSharding:
        """Return the sharding that splits dim 0 over ``data_axis``, also called ``axis_name``."""
        data_axis = axis_name or data_axis
        check_mesh_axis(mesh, data_axis)
        return NamedSharding(mesh, PartitionSpec(data_axis))

    def shard_batch(self, batch: Batch, sharding: NamedSharding) -> Batch:
        """Split every leaf of the batch over the devices; scalars are replicated.

        With several processes, each passes the samples it loaded. A dim that does not divide
        evenly raises an error with the leaf and the sizes.
        """
        return place(batch, sharding)

    @also_called(grads="gradients")
    def all_reduce_gradients(
        self,
        gradients: PyTree,
        reduce_type: Literal["mean", "sum"] = "mean",
        axis_name: AxisName = DEFAULT_AXIS,
    ) -> PyTree:
        """Combine the gradients of all devices along a named axis.

        Inside ``jax.shard_map`` or ``jax.vmap`` pass their axis name. Under plain ``jax.jit``
        there is no axis: arrays are global, gradients of a mean loss are already the mean over the
        whole batch, and ``"mean"`` returns them unchanged.

        In ``shard_map`` with ``check_vma`` (its default) JAX sums the gradients of replicated
        parameters itself. Such gradients raise an error: their mean would be too large by a factor
        of the number of devices.
        """
        if reduce_type not in ("mean", "sum"):
            what = f"Unsupported reduce_type: {reduce_type!r}"
            raise UserError(what, fix='write "mean" or "sum"')
        if reduce_type == "sum":
            axes = require_axes(axis_name, 'all_reduce_gradients with reduce_type="sum"')
        else:
            axes = resolve_axes(axis_name)
        _check_unreduced(gradients, axes)
        reduce = jax.lax.psum if reduce_type == "sum" else jax.lax.pmean
        return jax.tree.map(lambda leaf: reduce(leaf, axes), gradients) if axes else gradients

    def shard_model_state(
        self, state: PyTree, mesh: Mesh, param_sharding: Literal["replicate", "shard"] = "replicate"
    ) -> PyTree:
        """Copy the state to every device, or split each leaf over the mesh's data axis.

        ``"shard"`` splits the largest dim that divides over ``fsdp``, else ``data``, else the
        mesh's first axis; a leaf without such a dim is replicated.
        """
        if param_sharding == "replicate":
            return replicate(state, mesh)
        if param_sharding == "shard":
            axis = next(
                (name for name in reversed(BATCH_AXES) if name in mesh.shape),
                str(mesh.axis_names[0]),
            )
            return place_whole(state, lambda leaf: _state_sharding(leaf, mesh, axis))
        raise UserError(
            f"Unsupported param_sharding: {param_sharding!r}", fix='write "replicate" or "shard"'
        )

    def replicate_params(self, params: PyTree, mesh: Mesh) -> PyTree:
        """Put a full copy of the parameters on every device of the mesh."""
        return replicate(params, mesh)

    create_data_parallel_sharding_static = static_twin(create_data_parallel_sharding)
    shard_batch_static = static_twin(shard_batch)
    all_reduce_gradients_static = static_twin(all_reduce_gradients)


def _check_unreduced(grads: PyTree, axes: tuple[str, ...]) -> None:
    """Refuse gradients that shard_map has already summed: they would be scaled twice."""
    arrays = [leaf for leaf in jax.tree.leaves(grads) if isinstance(leaf, jax.Array)]
    for axis in axes:
        if arrays and tracks_varying(axis) and not any(axis in varying_axes(a) for a in arrays):
            size = jax.lax.axis_size(axis)
            raise UserError(
                f"the gradients are the same on all {size} devices of `{axis}`",
                why="shard_map with check_vma has already summed the gradients of replicated "
                f"parameters, so their mean would be {size} times too large",
                fix="pass check_vma=False to jax.shard_map, or average the loss with jax.lax.pmean "
                "before differentiating and leave this call out",
            )


def _state_sharding(leaf: Leaf, mesh: Mesh, axis: str) -> NamedSharding:
    shape = np.shape(leaf)
    fitting = [dim for dim, size in enumerate(shape) if size and size % mesh.shape[axis] == 0]
    if not fitting or math.prod(shape) == 0:
        return NamedSharding(mesh, PartitionSpec())
    largest = max(fitting, key=lambda dim: shape[dim])
    return NamedSharding(mesh, PartitionSpec(*(None,) * largest, axis))
