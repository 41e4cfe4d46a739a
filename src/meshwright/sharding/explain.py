"""What each device holds, leaf by leaf, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.program.layout import Layout
from meshwright.sharding.decide import Decision
from meshwright.sharding.placement import bytes_per_device

PARAMETER_AXES = ("fsdp", "tensor")


@dataclass(frozen=True)
class LeafReport:
    """Where one parameter of the model lives.

    Attributes:
        path: canonical path.
        shape: its dims.
        dtype: its number format.
        spec: mesh axes per dim; empty text for a dim that is whole.
        bytes: of the whole parameter.
        bytes_per_device: of one device's piece.
        whole_over: axes that could divide it and do not.
        reason: why it lives there.
        remedy: what would divide it further; empty if nothing is left to divide.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str, ...]
    bytes: int
    bytes_per_device: int
    whole_over: tuple[str, ...]
    reason: str
    remedy: str


def explain(layout: Layout, decision: Decision, sizes: Mapping[str, int]) -> list[LeafReport]:
    """Describe every parameter of the model, in canonical order."""
    found: dict[int, LeafReport] = {}
    for number, step in enumerate(layout.step_leaves):
        if step.leaf.role != "param":
            continue
        placement = decision.at_rest[number]
        for source in step.sources:
            leaf = layout.leaves[source]
            dims = placement.dims[1:] if step.stacked else placement.dims
            whole = [a for a in PARAMETER_AXES if sizes.get(a, 1) > 1 and a not in placement.axes()]
            found[source] = LeafReport(
                path=leaf.path,
                shape=leaf.shape,
                dtype=str(leaf.dtype),
                spec=tuple(",".join(axes) for axes in dims),
                bytes=leaf.nbytes,
                bytes_per_device=bytes_per_device(leaf, placement, sizes),
                whole_over=tuple(whole),
                reason=placement.reason,
                remedy=_remedy(leaf.shape, leaf.size, whole, sizes),
            )
    return [found[source] for source in sorted(found)]


def _remedy(
    shape: Sequence[int], elements: int, whole: Sequence[str], sizes: Mapping[str, int]
) -> str:
    if not whole:
        return ""
    divisible = [axis for axis in whole if any(size % sizes[axis] == 0 for size in shape)]
    if not divisible:
        counts = ", ".join(f"{axis}={sizes[axis]}" for axis in whole)
        return f"a model size divisible by {counts}"
    if "fsdp" in divisible:
        return f"sharding.min_shard_size={elements} or less"
    return "a rule in sharding.rules, if its communication is worth it"
