"""Grouped convolutions on a mesh: sharded over every axis.

If samples are sharded over one axis and nothing over another, XLA sums the gradient of a grouped
convolution's kernel over both: the result is too large by the size of the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax import lax
from jax.sharding import PartitionSpec

from meshwright.mesh.axes import BATCH_AXES
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, Value, aval_of


def is_grouped(eqn: Equation) -> bool:
    """Whether an equation is a grouped convolution."""
    return (
        eqn.primitive.name == "conv_general_dilated"
        and max(eqn.params["feature_group_count"], eqn.params["batch_group_count"]) > 1
    )


class GroupedLayout:
    """How a grouped convolution is sharded over all axes of a mesh.

    Channels are sharded over ``tensor``, or samples if the groups are not divisible; what is not
    divisible either is computed on every device.

    Args:
        eqn: the convolution.
        mesh: where it runs.
    """

    def __init__(self, eqn: Equation, mesh: MeshView) -> None:
        self._mesh, sizes = mesh, mesh.auto_axes
        self._numbers = eqn.params["dimension_numbers"]
        lhs, out = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
        samples = math.gcd(lhs[self._numbers.lhs_spec[0]], out[self._numbers.out_spec[0]])
        axes = tuple(axis for axis in BATCH_AXES if sizes.get(axis, 1) > 1)
        tensor = ("tensor",) if sizes.get("tensor", 1) > 1 else ()
        count = eqn.params["feature_group_count"]
        by_channel = bool(tensor) and count % sizes["tensor"] == 0
        fits = samples % math.prod(sizes[a] for a in axes) == 0
        all_fit = samples % math.prod(sizes[a] for a in (*axes, *tensor)) == 0
        self.needed = bool(axes and tensor)
        self._channels = tensor if by_channel and fits else ()
        self._samples = axes if by_channel and fits else (*axes, *tensor) if all_fit else ()

    def constrain_operands(self, operands: Sequence[Value]) -> list[Value]:
        """Return the input and the kernel in their layouts."""
        lhs, rhs = operands
        samples, channels = self._numbers.lhs_spec[:2]
        return [
            self._constrain(lhs, {samples: self._samples, channels: self._channels}),
            self._constrain(rhs, {self._numbers.rhs_spec[0]: self._channels}),
        ]

    def constrain_results(self, results: Sequence[Value]) -> list[Value]:
        """Return the convolution's results in their layout."""
        samples, channels = self._numbers.out_spec[:2]
        axes = {samples: self._samples, channels: self._channels}
        return [self._constrain(result, axes) for result in results]

    def _constrain(self, array: Value, axes: Mapping[int, tuple[str, ...]]) -> Value:
        spec = PartitionSpec(*(axes.get(dim) or None for dim in range(array.ndim)))
        return lax.with_sharding_constraint(array, self._mesh.sharding(spec))
