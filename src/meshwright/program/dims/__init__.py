"""Dim classes: which dims of a traced program belong together, and what sharding them costs."""

from meshwright.program.dims.atoms import Atom
from meshwright.program.dims.classes import (
    DimClasses,
    Event,
    LeafDims,
    LeafLabel,
    Roles,
    find_dim_classes,
)
from meshwright.program.dims.walk import Frame, all_frames

__all__ = [
    "Atom",
    "DimClasses",
    "Event",
    "Frame",
    "LeafDims",
    "LeafLabel",
    "Roles",
    "all_frames",
    "find_dim_classes",
]
