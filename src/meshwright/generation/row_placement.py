"""Where generation keeps rows and weights on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.generation.token_decoder import SplitModel
from meshwright.mesh.axes import BATCH_AXES, TENSOR, resolve_alias
from meshwright.program.dims.classes import LeafLabel, find_dim_classes
from meshwright.sharding.tensor import check_tensor_size, choose_tensor_dims
from meshwright.text.units import human_bytes
from meshwright.trees import from_key_data, key_data

FREE_SHARE = 0.7
"""The share of a device's memory that gathered weights may take; caches and logits need some."""

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class RowPlacement:
    """Rows over data and fsdp, weights over tensor alone.

    Attributes:
        mesh: the mesh; None for one device.
    """

    mesh: Mesh | None = None

    @property
    def _row_axes(self) -> tuple[str, ...]:
        names = () if self.mesh is None else self.mesh.axis_names
        return tuple(name for name in names if resolve_alias(name) in BATCH_AXES)

    @property
    def parts(self) -> int:
        """Into how many parts rows are divided."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in self._row_axes)

    @property
    def divides_weights(self) -> bool:
        """Whether weights may be divided."""
        shape = {} if self.mesh is None else self.mesh.shape
        return any(size > 1 for name, size in shape.items() if resolve_alias(name) == TENSOR)

    @property
    def kernel(self) -> str:
        """What computes attention over whole prompts; empty for the model's own operations."""
        return "cudnn" if self.mesh is None and jax.default_backend() == "gpu" else ""

    def rows(self, tree: Tree) -> Tree:
        """Constrain dim 0 of every array; the others stay as the weights' sharding leads to."""
        mesh = self.mesh
        if mesh is None:
            return tree
        free = PartitionSpec.UNCONSTRAINED

        def constrain(array: Array) -> Array:
            spec = PartitionSpec(self._row_axes, *[free] * (array.ndim - 1))
            return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

        return jax.tree.map(constrain, tree)

    def whole(self, tree: Tree) -> Tree:
        """Constrain arrays to be whole on every device, for every process to read them."""
        return (
            tree
            if self.mesh is None or jax.process_count() == 1
            else jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))
        )

    def put(self, tree: Tree) -> Tree:
        """Return arrays of the host on every device."""
        where = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda array: _put(array, where), tree)

    def place(self, model: SplitModel, dtype: Any = None) -> tuple[list[Array], str]:
        """Return a model's weights gathered over all axes but tensor, and cast.

        Args:
            model: the model, with weights sharded in any way; they stay as they are.
            dtype: of those that are floats; None leaves it.

        Returns:
            The weights, and a remark if they do not fit; then they stay sharded.
        """
        weights = [leaf if isinstance(leaf, Array) else jnp.asarray(leaf) for leaf in model.weights]
        dtypes = [_cast(weight.dtype, dtype) for weight in weights]
        shardings = self._shardings(model, weights)
        remark = self._too_large(weights, dtypes, shardings)
        if remark:
            shardings = [weight.sharding for weight in weights]
        placed = weights
        if self.mesh is not None:
            devices = set(self.mesh.devices.flat)
            elsewhere = any(w.sharding.device_set != devices for w in weights)
            placed = list(map(_put, weights, shardings)) if elsewhere else weights
        if any(_changes(*each) for each in zip(placed, dtypes, shardings, strict=True)):
            placed = _cast_all(placed, dtypes=tuple(dtypes), shardings=tuple(shardings))
        return placed, remark

    def _shardings(self, model: SplitModel, weights: Sequence[Array]) -> list[NamedSharding | None]:
        """Return the sharding of each weight over tensor alone."""
        mesh = self.mesh
        if mesh is None:
            return [None] * len(weights)
        own = [_spec_on(mesh, weight.sharding) for weight in weights]
        if any(spec is not None for spec in own):
            specs = [PartitionSpec(*map(_over_tensor, spec or ())) for spec in own]
        else:
            axis = next((name for name in mesh.axis_names if resolve_alias(name) == TENSOR), None)
            dims = tensor_dims(model, 1 if axis is None else mesh.shape[axis])
            specs = [
                PartitionSpec(*[None] * dim, axis) if dim >= 0 else PartitionSpec() for dim in dims
            ]
        return [NamedSharding(mesh, spec) for spec in specs]

    def _too_large(self, weights: Any, dtypes: Any, shardings: Any) -> str:
        if self.mesh is None:
            return ""
        limit = (self.mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
        need = sum(
            math.prod(sharding.shard_shape(weight.shape)) * dtype.itemsize
            for weight, dtype, sharding in zip(weights, dtypes, shardings, strict=True)
        )
        if limit is None or need <= FREE_SHARE * limit:
            return ""
        return (
            f"the weights stay sharded and are gathered for every token, which is slower: gathered "
            f"they would take {human_bytes(need)} of {human_bytes(limit)} on each device"
        )


def placement_of(weights: Sequence[Array], mesh: Mesh | None = None) -> RowPlacement:
    """Return the placement on a mesh; without one, on the mesh that the weights are on."""
    for sharding in (getattr(weight, "sharding", None) for weight in weights):
        if mesh is None and isinstance(sharding, NamedSharding):
            mesh = sharding.mesh if isinstance(sharding.mesh, Mesh) else None
    return RowPlacement(mesh if mesh is not None and mesh.size > 1 else None)


def tensor_dims(model: SplitModel, size: int) -> list[int]:
    """Return the dim of each weight that a tensor axis divides, found as in training; -1 for none.

    Heads are divided, and dims inside of an MLP, so that a block sends what it adds and no more.
    """
    if size == 1:
        return [-1] * len(model.weights)
    structs = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in model.weights]
    batch = [jax.ShapeDtypeStruct((2, *s.shape[1:]), s.dtype) for s in model.source]
    batch.append(jax.ShapeDtypeStruct((2, 8), jnp.int32))
    program = jax.make_jaxpr(lambda *args: model.logits_of(args[:-1], args[-1]))(*structs, *batch)
    floats = [jnp.issubdtype(w.dtype, jnp.floating) for w in model.weights]
    labels = [LeafLabel("param" if f else "state", str(n)) for n, f in enumerate(floats)]
    of_batch = [LeafLabel("batch", f"rows{n}") for n in range(len(batch))]
    classes = find_dim_classes(program, [*labels, *of_batch])
    choice = choose_tensor_dims(classes, size)
    check_tensor_size(classes, choice)
    found = [choice.dim_of(str(n)) for n in range(len(labels))]
    return [-1 if dim is None else dim for dim in found]


def _put(value: Any, sharding: NamedSharding | None) -> Array:
    """Return a value on devices, also on those of other processes that have the same value."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    data = np.asarray(key_data(value))
    made = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
    return from_key_data(made, value.dtype)


def _spec_on(mesh: Mesh, sharding: Any) -> Any:
    on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
    return sharding.spec if on_mesh else None


def _over_tensor(axes: Any) -> Any:
    """Return what is left of a dim's axes without those of rows and stages."""
    names = (axes,) if isinstance(axes, str) else axes if isinstance(axes, tuple) else ()
    return tuple(name for name in names if resolve_alias(name) == TENSOR) or None


def _changes(weight: Array, dtype: Any, sharding: Any) -> bool:
    return weight.dtype != dtype or (sharding is not None and weight.sharding != sharding)


@partial(jax.jit, static_argnames=("dtypes", "shardings"))
def _cast_all(
    weights: Sequence[Array], *, dtypes: tuple[Any, ...], shardings: tuple[Any, ...]
) -> list[Array]:
    cast = [w if w.dtype == d else w.astype(d) for w, d in zip(weights, dtypes, strict=True)]
    pairs = zip(cast, shardings, strict=True)
    return [w if s is None else jax.lax.with_sharding_constraint(w, s) for w, s in pairs]


@lru_cache
def _cast(own: Any, asked: Any) -> Any:
    return jnp.dtype(asked) if asked is not None and jnp.issubdtype(own, jnp.floating) else own
