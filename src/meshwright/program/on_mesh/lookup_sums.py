"""How the gradients of lookups are summed over devices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.mesh.axes import CONTEXT
from meshwright.program.evaluate.mesh_view import MeshView, axes_of, run_locally
from meshwright.program.jaxpr.equations import Equation, aval_of
from meshwright.program.kernels.fused_attention import padded


@dataclass(frozen=True)
class LookupSums:
    """How the gradient of a lookup is summed over devices.

    Attributes:
        rows: the layout of the indices if samples and positions shard them. XLA's partitioner would
            sum over all positions whole, before it scatters over fsdp.
        layout: the layout of the gradient: that of the weight between steps, or without ``rows``
            that of the whole weight. Without this constraint, the compiler would add the gradient
            to the other one of a tied embedding, which then has to be reduced over the mesh before,
            and the sum once more.
    """

    rows: PartitionSpec | None
    layout: PartitionSpec
    mesh: MeshView

    def __call__(self, gradient: Callable[..., Any], operands: Any, cotangent: Any) -> Any:
        """Return the gradient of the table, by its function of the operands and a cotangent."""
        if self.rows is None:
            found = gradient(operands, cotangent)
            return lax.with_sharding_constraint(found, self.mesh.sharding(self.layout))
        table, indices = operands
        axes = axes_of([self.rows])
        others = tuple(axis for axis in self.mesh.auto_axes if axis in axes - {"fsdp"})
        dim, size = self.rows.index(CONTEXT), self.mesh.auto_axes[CONTEXT]
        # Devices do not need the table, of which only the shape is read.
        zeros = partial(jnp.zeros, table.shape, table.dtype)
        parts = run_locally(
            lambda at, own: gradient((zeros(), at), own)[None, None],
            [padded(x, (dim,), -x.shape[dim] % size) for x in (indices, cotangent)],
            (self.rows, self.rows),
            PartitionSpec("fsdp" if "fsdp" in axes else None, others),
            self.mesh,
        )
        scattered = self.mesh.sharding(PartitionSpec(others, *self.layout))
        return lax.with_sharding_constraint(parts.sum(0), scattered).sum(0)


def lookup_rows(eqn: Equation, layout: PartitionSpec | None) -> PartitionSpec | None:
    """Return the layout of a lookup's indices, by that of its result.

    None unless they are sharded by samples and by positions.
    """
    numbers, rank = eqn.params["dimension_numbers"], len(aval_of(eqn.outvars[0]).shape)
    count = rank - len(numbers.offset_dims)
    rows = PartitionSpec(*(layout or ())[:count])
    sharded = [entry for entry in rows if entry is not None]
    in_front = numbers.offset_dims == (*range(count, rank),)
    return rows if in_front and len(sharded) == 2 and CONTEXT in sharded else None
