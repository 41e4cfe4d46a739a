"""What each device holds, leaf by leaf, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.program.layout import Layout, StepLeaf
from meshwright.program.parts import Leaf
from meshwright.sharding.decide import EVERYWHERE, Decision
from meshwright.sharding.placement import Placement, bytes_per_device

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
        bytes_per_device: of the piece of a device that has one.
        stage: the pipeline stage whose devices alone hold it; None where all do.
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
    stage: int | None
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
        for row, source in zip(step.places, step.sources, strict=True):
            leaf = layout.leaves[source]
            own = _of_one_block(placement, step, leaf, sizes) if step.stacked else placement
            whole = [a for a in PARAMETER_AXES if sizes.get(a, 1) > 1 and a not in own.axes()]
            found[source] = LeafReport(
                path=leaf.path,
                shape=leaf.shape,
                dtype=str(leaf.dtype),
                spec=tuple(",".join(axes) for axes in own.dims),
                bytes=leaf.nbytes,
                bytes_per_device=bytes_per_device(leaf, own, sizes),
                stage=_stage(placement, step, row, sizes),
                whole_over=tuple(whole),
                reason=own.reason,
                remedy=_remedy(leaf.shape, leaf.size, whole, sizes),
            )
    return [found[source] for source in sorted(found)]


def _of_one_block(
    placement: Placement, step: StepLeaf, leaf: Leaf, sizes: Mapping[str, int]
) -> Placement:
    """Return where one row of a stack lives; its reason counts the dims of a row."""
    reason = re.sub(r"\bdim (\d+)", lambda m: f"dim {int(m[1]) - 1}", placement.reason)
    shapes = ["×".join(map(str, shape)) for shape in (step.leaf.shape, leaf.shape)]
    reason = reason.replace(f"dim of {shapes[0]} ", f"dim of {shapes[1]} ")
    if "pipe" in placement.dims[0]:
        others = any(size > 1 for axis, size in sizes.items() if axis != "pipe")
        alike = "; the same on all its devices" if others else ""
        reason = reason.replace(f"; {EVERYWHERE}", alike)
    return replace(placement, dims=placement.dims[1:], reason=reason)


def _stage(placement: Placement, step: StepLeaf, row: int, sizes: Mapping[str, int]) -> int | None:
    if not step.stacked or "pipe" not in placement.dims[0]:
        return None
    return row * sizes["pipe"] // step.leaf.shape[0]


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
