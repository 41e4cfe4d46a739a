"""Making a weight ready for use: cast, and gathered so that its gradient comes back divided."""

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
"""The name remat policies know gathered weights by."""


@dataclass(frozen=True)
class GatherSpecs:
    """The two layouts of a weight that is divided over fsdp: whole for use, divided at rest."""

    whole: PartitionSpec
    divided: PartitionSpec

    def per_layer(self) -> GatherSpecs:
        """Return the layouts of one layer of a stack."""
        return GatherSpecs(PartitionSpec(*self.whole[1:]), PartitionSpec(*self.divided[1:]))


def ready(
    value: Value,
    mesh: MeshView | None,
    *,
    dtype: DTypeLike | None,
    specs: GatherSpecs | None,
    trained: bool = True,
) -> Value:
    """Return a weight ready for use, in its own number format.

    Args:
        value: the weight at rest.
        mesh: where it is gathered; None if ``specs`` is.
        dtype: the compute format its values are rounded to (and sent in); None rounds nothing.
        specs: its layouts; None for a weight that is whole already.
        trained: whether it has a gradient.

    The gradient is laid out as the weight is at rest and not rounded: what comes back over the
    mesh is a reduce-scatter in the weight's own format. A plain constraint and a plain cast would
    give the whole gradient everywhere, rounded before the devices' parts are added.
    """
    if dtype is None and specs is None:
        return value
    whole = None if specs is None or mesh is None else mesh.sharding(specs.whole)
    divided = None if specs is None or mesh is None else mesh.sharding(specs.divided)

    def prepare(weight: Any) -> Any:
        used = weight if dtype is None else weight.astype(dtype)
        if whole is not None:
            # Fixed on both sides of the gather, or the cast would be moved behind it and twice
            # the bytes be sent.
            used = jax.lax.with_sharding_constraint(used, divided)
            used = jax.lax.with_sharding_constraint(used, whole)
        return checkpoint_name(used, GATHERED).astype(weight.dtype)

    if not trained:
        # A custom derivative that nothing differentiates would be kept, gathered, like any result.
        return prepare(value)
    use = jax.custom_vjp(prepare)

    # Not `use` itself: inside a checkpoint its result would be an operation of its own, and kept.
    def forward(weight: Any) -> tuple[Any, None]:
        return prepare(weight), None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        if whole is not None:
            # Whole first: otherwise the partitioner may move activations to where the pieces of
            # the gradient will lie, instead of reducing partial sums.
            cotangent = jax.lax.with_sharding_constraint(cotangent, whole)
            cotangent = jax.lax.with_sharding_constraint(cotangent, divided)
        return (cotangent,)

    use.defvjp(forward, backward)
    return checkpoint_name(use(value), GATHERED)
