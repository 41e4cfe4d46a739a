"""Gathering a divided weight for use, so that its gradient comes back divided."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

GATHERED = "gathered"
"""The name remat policies know gathered weights by."""


def gather(value: Any, mesh: Mesh, *, whole: PartitionSpec, divided: PartitionSpec) -> Any:
    """Return ``value`` laid out as ``whole``; its gradient is laid out as ``divided``.

    The second half is what makes the backward pass a reduce-scatter: a plain constraint would ask
    for the whole gradient everywhere.
    """
    whole_sharding, divided_sharding = NamedSharding(mesh, whole), NamedSharding(mesh, divided)

    def constrain(weight: Any) -> Any:
        return jax.lax.with_sharding_constraint(weight, whole_sharding)

    use = jax.custom_vjp(constrain)

    # Not `use` itself: inside a checkpoint its result would be an operation of its own, and kept.
    def forward(weight: Any) -> tuple[Any, None]:
        return constrain(weight), None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        return (jax.lax.with_sharding_constraint(cotangent, divided_sharding),)

    use.defvjp(forward, backward)
    return checkpoint_name(use(value), GATHERED)
