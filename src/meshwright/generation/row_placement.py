"""Where generation keeps rows and weights on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.mesh.axes import BATCH_AXES, resolve_alias
from meshwright.text.units import human_bytes

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
        """Constrain arrays to be whole on every device, so that every process can read them."""
        return (
            tree
            if self.mesh is None
            else jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))
        )

    def model(self, model: nnx.Module, dtype: Any = None) -> tuple[nnx.Module, str]:
        """Return a model with its weights gathered over all axes but tensor, and cast.

        Args:
            model: the model, with weights sharded in any way; it stays as it is.
            dtype: of the weights that are floats; None leaves it.

        Returns:
            The model, and a remark if its gathered weights do not fit; then they stay sharded.
        """
        graphdef, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        weights = [leaf if isinstance(leaf, Array) else jnp.asarray(leaf) for leaf in leaves]
        dtypes = [_cast(weight.dtype, dtype) for weight in weights]
        shardings = [self._gathered(weight) for weight in weights]
        remark = self._too_large(weights, dtypes, shardings)
        if remark:
            shardings = [weight.sharding for weight in weights]
        if self.mesh is None:
            placed = _cast_all(dtypes, weights)
        else:
            devices = set(self.mesh.devices.flat)
            elsewhere = any(w.sharding.device_set != devices for w in weights)
            given = jax.device_put(weights, shardings) if elsewhere else weights
            placed = _placing(tuple(dtypes), tuple(shardings))(given)
        return nnx.merge(graphdef, jax.tree.unflatten(tree, placed)), remark

    def _gathered(self, weight: Array) -> NamedSharding | None:
        """Return the sharding of a weight over tensor alone."""
        if self.mesh is None:
            return None
        own, spec = weight.sharding, PartitionSpec()
        if isinstance(own, NamedSharding) and own.mesh == self.mesh:
            spec = own.spec
        return NamedSharding(self.mesh, PartitionSpec(*map(_over_tensor, spec)))

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


@lru_cache(maxsize=8)
def _placing(dtypes: tuple[Any, ...], shardings: tuple[Any, ...]) -> Callable[..., list[Array]]:
    """Return what casts and gathers weights; compiled once, since training calls it often."""
    return jax.jit(partial(_cast_all, dtypes), out_shardings=list(shardings))


def _over_tensor(axes: Any) -> Any:
    """Return what is left of a dim's axes without those of rows and stages."""
    names = (axes,) if isinstance(axes, str) else axes if isinstance(axes, tuple) else ()
    return tuple(name for name in names if resolve_alias(name) == "tensor") or None


def _cast_all(dtypes: Sequence[Any], weights: Sequence[Array]) -> list[Array]:
    return [w if w.dtype == d else w.astype(d) for w, d in zip(weights, dtypes, strict=True)]


def _cast(own: Any, asked: Any) -> Any:
    return jnp.dtype(asked) if asked is not None and jnp.issubdtype(own, jnp.floating) else own
