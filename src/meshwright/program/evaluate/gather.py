"""Preparing a weight for use: cast and gathered, with a gradient that is divided again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Value

GATHERED = "gathered"
"""The name by which remat policies recognize gathered weights."""


@dataclass(frozen=True)
class GatherSpecs:
    """The two layouts of a weight that is divided over fsdp: whole for use, divided in storage."""

    whole: PartitionSpec
    divided: PartitionSpec

    def per_layer(self) -> GatherSpecs:
        """Return the layouts of one layer of a stack."""
        return GatherSpecs(PartitionSpec(*self.whole[1:]), PartitionSpec(*self.divided[1:]))


def prepare_weight(
    value: Value,
    mesh: MeshView | None,
    *,
    dtype: DTypeLike | None,
    specs: GatherSpecs | None,
    trained: bool = True,
) -> Value:
    """Return a weight prepared for use, in its original dtype.

    Args:
        value: the weight as it is stored.
        mesh: where it is gathered; None if ``specs`` is.
        dtype: the compute dtype its values are rounded to (and sent in); None rounds nothing.
        specs: its layouts; None for a weight that is already whole.
        trained: whether it has a gradient.

    The gradient has the layout of the stored weight and is not rounded: it is reduced by a
    reduce-scatter in the weight's dtype. With a plain constraint and a plain cast, every device
    would get the whole gradient, rounded before the devices' partial sums are added.
    """
    if dtype is None and specs is None:
        return value
    whole = None if specs is None or mesh is None else mesh.sharding(specs.whole)
    divided = None if specs is None or mesh is None else mesh.sharding(specs.divided)

    def prepare(weight: Any) -> Any:
        used = weight if dtype is None else weight.astype(dtype)
        if whole is not None:
            # Constrained on both sides of the gather: otherwise the compiler may cast after it,
            # which sends twice the bytes.
            used = jax.lax.with_sharding_constraint(used, divided)
            used = jax.lax.with_sharding_constraint(used, whole)
        return checkpoint_name(used, GATHERED).astype(weight.dtype)

    if not trained:
        # The result of a custom_vjp that nothing differentiates would be saved, gathered.
        return prepare(value)
    use = jax.custom_vjp(prepare)

    # Not `use` itself: inside a checkpoint, its result would be a separate value and saved.
    def forward(weight: Any) -> tuple[Any, None]:
        return prepare(weight), None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        if whole is not None:
            # Whole first: otherwise the partitioner may move activations to the devices that hold
            # the pieces of the gradient, instead of reducing partial sums.
            cotangent = jax.lax.with_sharding_constraint(cotangent, whole)
            cotangent = jax.lax.with_sharding_constraint(cotangent, divided)
        return (cotangent,)

    use.defvjp(forward, backward)
    return checkpoint_name(use(value), GATHERED)
