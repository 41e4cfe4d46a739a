"""Where generation keeps rows and weights on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.compiled.memory import memory_stats
from meshwright.generation.token_decoder import SplitModel
from meshwright.mesh.axes import ROW_AXES, TENSOR, entry_names, resolve_alias
from meshwright.program.dims.classes import LeafLabel, find_dim_classes
from meshwright.sharding.shard import fsdp_sharding
from meshwright.sharding.tensor import check_tensor_size, choose_tensor_dims
from meshwright.text.units import human_bytes
from meshwright.trees import bytes_on_device, from_key_data, key_data

FREE_SHARE = 0.7
"""The share of a device's memory that gathered weights may take; caches and logits need some."""

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class RowPlacement:
    """Rows over data, fsdp and context, weights over tensor alone.

    Attributes:
        mesh: the mesh; None for one device.
        gathered: whether weights are over tensor alone; if not, over all axes.
        joins: whether there is room for weights of one input twice, as they are and joined.
    """

    mesh: Mesh | None = None
    gathered: bool = True
    joins: bool = True

    @property
    def _row_axes(self) -> tuple[str, ...]:
        names = () if self.mesh is None else self.mesh.axis_names
        return tuple(name for name in names if resolve_alias(name) in ROW_AXES)

    @property
    def parts(self) -> int:
        """Into how many parts rows are divided."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in self._row_axes)

    @property
    def tensor(self) -> int:
        """Into how many parts heads are divided."""
        shape = {} if self.mesh is None else self.mesh.shape
        return math.prod(size for name, size in shape.items() if resolve_alias(name) == TENSOR)

    @property
    def divides_weights(self) -> bool:
        """Whether weights may be divided, or are not to be joined."""
        return self.tensor > 1 or not (self.gathered and self.joins)

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
        if self.mesh is None or jax.process_count() == 1:
            return tree
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

    def put(self, tree: Tree) -> Tree:
        """Return arrays of the host on every device."""
        where = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda array: _put(array, where), tree)

    def place(self, model: SplitModel, dtype: Any = None) -> tuple[RowPlacement, list[Array], str]:
        """Return a model's weights gathered over all axes but tensor, and cast to ``dtype``.

        The model's own stay as they are. Also returns where the weights are then, and a remark if
        they do not fit and are over all axes.
        """
        weights = [leaf if isinstance(leaf, Array) else jnp.asarray(leaf) for leaf in model.weights]
        dtypes = [cast_dtype(weight.dtype, dtype) for weight in weights]
        shardings = self._shardings(model, weights)
        limit, placement, remark = device_memory(self.mesh), self, ""
        structs = list(map(_struct, weights, dtypes, shardings))
        if self.mesh is not None and (need := bytes_on_device(structs)) > FREE_SHARE * limit:
            structs = list(map(self._divided, structs))
            shardings = [struct.sharding for struct in structs]
            placement, held = replace(self, gathered=False), bytes_on_device(structs)
            remark = (
                f"the weights stay divided over all devices, which is slower: gathered they would "
                f"take {human_bytes(need)} of {human_bytes(limit)} on each device; divided they "
                f"take {human_bytes(held)}, and each token gathers up to {human_bytes(need - held)}"
            )
        if self.mesh is not None:
            devices = set(self.mesh.devices.flat)
            if any(w.sharding.device_set != devices for w in weights):
                weights = list(map(_put, weights, shardings))
        each = zip(weights, dtypes, shardings, strict=True)
        if any(w.dtype != d or (s is not None and w.sharding != s) for w, d, s in each):
            weights = _cast_all(weights, dtypes=tuple(dtypes), shardings=tuple(shardings))
        return placement, weights, remark

    def _divided(self, struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return a weight over all axes."""
        assert self.mesh is not None
        for name, size in self.mesh.shape.items():
            if size > 1 and resolve_alias(name) != TENSOR:
                struct = _struct(struct, struct.dtype, fsdp_sharding(struct, self.mesh, name, 0))
        return struct

    def _shardings(self, model: SplitModel, weights: Sequence[Array]) -> list[NamedSharding | None]:
        """Return the sharding of each weight over tensor alone."""
        mesh = self.mesh
        if mesh is None:
            return [None] * len(weights)
        given = [weight.sharding for weight in weights]
        own = [s.spec if isinstance(s, NamedSharding) and s.mesh == mesh else None for s in given]
        if any(spec is not None for spec in own):
            specs = [PartitionSpec(*map(_over_tensor, spec or ())) for spec in own]
        else:
            axis = next((name for name in mesh.axis_names if resolve_alias(name) == TENSOR), None)
            dims = tensor_dims(model, 1 if axis is None else mesh.shape[axis])
            specs = [
                PartitionSpec(*[None] * dim, axis) if dim >= 0 else PartitionSpec() for dim in dims
            ]
        return [NamedSharding(mesh, spec) for spec in specs]


def device_memory(mesh: Mesh | None) -> float:
    """Return the bytes of a device's memory; infinity if it is not known."""
    devices = jax.local_devices() if mesh is None else mesh.local_devices
    return memory_stats(devices[0]).get("bytes_limit", math.inf)


def _struct(array: Any, dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)


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


def _over_tensor(axes: Any) -> Any:
    """Return what is left of a dim's axes without those of rows and stages."""
    return tuple(name for name in entry_names(axes) if resolve_alias(name) == TENSOR) or None


@partial(jax.jit, static_argnames=("dtypes", "shardings"))
def _cast_all(
    weights: Sequence[Array], *, dtypes: tuple[Any, ...], shardings: tuple[Any, ...]
) -> list[Array]:
    cast = [w if w.dtype == d else w.astype(d) for w, d in zip(weights, dtypes, strict=True)]
    pairs = zip(cast, shardings, strict=True)
    return [w if s is None else jax.lax.with_sharding_constraint(w, s) for w, s in pairs]


@lru_cache
def cast_dtype(own: Any, asked: Any) -> Any:
    """Return the dtype of a weight while generating: the one asked for, if it is a float."""
    return jnp.dtype(asked) if asked is not None and jnp.issubdtype(own, jnp.floating) else own
