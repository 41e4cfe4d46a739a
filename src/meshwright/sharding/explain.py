"""A report on every parameter: its shard per device, and the reason for its placement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import Setting
from meshwright.mesh.axes import MODEL_AXES, PIPE
from meshwright.program.trace.layout import Layout
from meshwright.sharding.decide import Decision
from meshwright.sharding.placement import Placement, Reason, bytes_per_device

PARAMETER_AXES = tuple(axis for axis in MODEL_AXES if axis != PIPE)


@dataclass(frozen=True)
class LeafReport:
    """The placement of one parameter of the model.

    Attributes:
        spec: mesh axes per dim; an empty string for a dim that is not sharded.
        bytes: size of the whole parameter.
        bytes_per_device: size of its shard.
        stage: the pipeline stage that holds it; None if all of them do.
        whole_over: mesh axes that could shard it but do not.
        remedy: a change that would shard it further; empty if every axis shards it.
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
    reports: dict[int, LeafReport] = {}
    for number, step in enumerate(layout.step_leaves):
        if step.leaf.role != "param":
            continue
        placement = decision.at_rest[number]
        for row, source in zip(step.source_rows, step.sources, strict=True):
            leaf = layout.leaves[source]
            placed = _of_one_block(placement, sizes) if step.stacked else placement
            whole = [a for a in PARAMETER_AXES if sizes.get(a, 1) > 1 and a not in placed.axes()]
            reports[source] = LeafReport(
                path=leaf.path,
                shape=leaf.shape,
                dtype=str(leaf.dtype),
                spec=tuple(",".join(axes) for axes in placed.dims),
                bytes=leaf.nbytes,
                bytes_per_device=bytes_per_device(leaf, placed, sizes),
                stage=row * sizes[PIPE] // step.leaf.shape[0]
                if step.stacked and PIPE in placement.dims[0]
                else None,
                whole_over=tuple(whole),
                reason=placed.reason,
                remedy=_remedy(leaf.shape, leaf.size, whole, sizes),
            )
    return [reports[source] for source in sorted(reports)]


def _of_one_block(placement: Placement, sizes: Mapping[str, int]) -> Placement:
    """Return the placement of one block of a stack."""
    reasons = [reason.in_one_block() for reason in placement.reasons]
    # Stages split the stack, not the block: without another reason it is whole on its stage.
    only_staged = all(reason.of_stages for reason in reasons)
    if reasons and only_staged and any(n > 1 for axis, n in sizes.items() if axis != "pipe"):
        reasons.append(Reason("the same on all its devices"))
    return Placement(placement.path, placement.dims[1:], tuple(reasons))


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
        return f"{Setting('sharding.min_shard_size', elements)} or less"
    return f"a rule in {Setting('sharding.rules')}, if its communication is worth it"
