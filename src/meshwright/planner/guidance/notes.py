"""What the tables of a report do not say by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.mesh.axes import describe_sizes
from meshwright.planner.estimate.estimate import MARGIN_WORDS, Estimate, MemoryEstimate
from meshwright.planner.estimate.words import settings_of
from meshwright.planner.search.scaling import ScalingPoint
from meshwright.planner.search.what_if import WhatIf
from meshwright.text.units import counted, human_bytes

SENT = "communication is what is sent over an axis of the mesh while nothing is computed"


def memory_note(memory: MemoryEstimate) -> str:
    """Explain a margin, or why fewer gradients are counted than there are; empty if neither."""
    if memory.reserved:
        return MARGIN_WORDS
    if memory.gradients >= 0.99 * memory.all_gradients:
        return ""
    size = human_bytes(memory.all_gradients)
    missing = f"of {size} of gradients, the others" if memory.gradients else f"{size} of gradients"
    return f"{missing} follow this peak, in memory that activations no longer need"


def scaling_note(points: Sequence[ScalingPoint]) -> str:
    """Say why devices are faster together than one by one; empty if they are not."""
    known = [point for point in points if point.estimate is not None]
    best = max(known, key=lambda point: point.efficiency, default=None)
    if best is None or best.estimate is None or round(100 * best.efficiency) <= 100:
        return ""
    first = known[0]
    assert first.estimate is not None
    return f"more than 100% per device: {_faster_together(first.estimate, best.estimate)}"


def _faster_together(few: Estimate, many: Estimate) -> str:
    """Return what a device saves if there are more of them."""
    one, other = (counted(each.plan.num_devices, "device") for each in (few, many))
    own, better = settings_of(few.plan), settings_of(many.plan)
    if own and own != better:
        runs = "runs" if few.plan.num_devices == 1 else "run"
        return f"{one} {runs} {own}; {other} have the memory for {better or 'a step without that'}"
    return f"each of {other} holds and updates a smaller part of the training state"


def change_lines(changes: Sequence[WhatIf]) -> list[str]:
    """Return what would change the decision; one sentence if nothing that was tried does."""
    if not changes or any(each.after is not None or each.found is None for each in changes):
        return list(map(str, changes))
    mesh, tried = changes[0].before.plan.mesh, " or ".join(each.change for each in changes)
    return [f"nothing that was tried: still {describe_sizes(mesh)} with {tried}"]
