"""Grouped convolutions on a mesh: sharded over every axis.

If samples are sharded over one axis and nothing over another, XLA sums the gradient of a grouped
convolution's kernel over both: the result is too large by the size of the second.
"""

import math
from typing import NamedTuple

from meshwright.mesh.axes import BATCH_AXES
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, aval_of


def is_grouped(eqn: Equation) -> bool:
    """Whether an equation is a grouped convolution."""
    return (
        eqn.primitive.name == "conv_general_dilated"
        and max(eqn.params["feature_group_count"], eqn.params["batch_group_count"]) > 1
    )


class GroupedLayout(NamedTuple):
    """The mesh axes that shard the samples and the channels of a grouped convolution."""

    samples: tuple[str, ...]
    channels: tuple[str, ...]


def grouped_layout(eqn: Equation, mesh: MeshView) -> GroupedLayout | None:
    """Return how a grouped convolution is sharded over all axes of a mesh; None if it need not be.

    Channels are sharded over ``tensor``, or samples if the groups are not divisible; what is not
    divisible either is computed on every device.
    """
    sizes, numbers = mesh.auto_axes, eqn.params["dimension_numbers"]
    axes = tuple(axis for axis in BATCH_AXES if sizes.get(axis, 1) > 1)
    if not axes or sizes.get("tensor", 1) == 1:
        return None
    lhs, out = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    samples = math.gcd(lhs[numbers.lhs_spec[0]], out[numbers.out_spec[0]])
    by_channel = eqn.params["feature_group_count"] % sizes["tensor"] == 0
    if by_channel and samples % math.prod(sizes[a] for a in axes) == 0:
        return GroupedLayout(axes, ("tensor",))
    all_axes = (*axes, "tensor")
    fits = samples % math.prod(sizes[a] for a in all_axes) == 0
    return GroupedLayout(all_axes if fits else (), ())
