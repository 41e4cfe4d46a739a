"""Dim classes: which dims of a traced program belong together, and what sharding them costs."""

from meshwright.program.dims.classes import (
    DimClasses,
    LeafDims,
    LeafLabel,
    Roles,
    find_dim_classes,
)
from meshwright.program.dims.factors import DimFactor
from meshwright.program.dims.op import ShardingEvent
from meshwright.program.dims.walk import ProgramDims, all_programs

__all__ = [
    "DimClasses",
    "DimFactor",
    "LeafDims",
    "LeafLabel",
    "ProgramDims",
    "Roles",
    "ShardingEvent",
    "all_programs",
    "find_dim_classes",
]
