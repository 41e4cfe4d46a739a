"""What would change the decision: the nearest change of the hardware or the batch that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.mesh.axes import AXES, describe_sizes
from meshwright.planner.estimate.estimate import Estimate, tied_with
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.search.candidates import PlanTask, Sizes
from meshwright.planner.search.search import SearchResult, search
from meshwright.text.units import human_bytes, human_seconds

FACTORS = (1.5, 2.0, 4.0)
NEAREST = 6
"""How many of the slower meshes, and of those that did not fit, are searched again."""


@dataclass(frozen=True)
class WhatIf:
    """One thing changed, and the recommended plans before and then; None if nothing fits."""

    change: str
    before: Estimate
    found: Estimate | None

    @property
    def after(self) -> Estimate | None:
        """The recommended plan with the change, if it has another mesh."""
        same = self.found is None or self.found.plan.mesh == self.before.plan.mesh
        return None if same else self.found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values: the mesh if it is another one, and what its plan needs."""
        return {
            "change": self.change,
            "mesh": self.after.plan.mesh if self.after else None,
            "step_time": self.found.time.step if self.found else None,
            "memory": self.found.memory.total if self.found else None,
        }

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.change}: no plan fits"
        if self.after is None:
            return f"{self.change}: still {describe_sizes(self.before.plan.mesh)}"
        per = human_seconds(self.after.time.step)
        return f"{self.change}: {describe_sizes(self.after.plan.mesh)}, {per} per step"


def what_ifs(estimator: Estimator, result: SearchResult) -> list[WhatIf]:
    """Return the smallest changes that lead to another mesh, or that none up to four times does."""
    task = result.task
    # A device by itself has no links.
    links = [_links(task)] if task.hardware.count > 1 else []
    return [_nearest(estimator, result, each) for each in (_memory(task), *links, _batch(task))]


Changes = list[tuple[str, PlanTask]]


def _nearest(estimator: Estimator, result: SearchResult, changes: Changes) -> WhatIf:
    """Try the largest change first: if it changes nothing, smaller ones do not either."""
    *nearer, (change, task) = changes
    farthest = WhatIf(change, result.best, _decision(estimator, result, task))
    if farthest.after is None:
        return farthest
    for change, task in nearer:
        found = WhatIf(change, result.best, _decision(estimator, result, task))
        if found.after is not None:
            return found
    return farthest


def _decision(estimator: Estimator, result: SearchResult, task: PlanTask) -> Estimate | None:
    """Return the best plan after a change, with the same mesh if it ties; None if none fits."""
    plans = search(estimator, task, top=1, meshes=list(_near(result))).plans
    if not plans:
        return None
    mesh = {axis: result.best.plan.size(axis) for axis in AXES}
    own = search(estimator, task, top=1, meshes=[mesh]).plans
    limit = tied_with(plans[0].time.step)
    return own[0] if own and own[0].time.step <= limit else plans[0]


def _near(result: SearchResult) -> Iterator[Sizes]:
    """Yield the meshes that a change may favour: ranked, slower, or a little too large."""
    slower, large = result.slower()[:NEAREST], result.too_large()[:NEAREST]
    for estimate in (*result.plans, *slower, *large):
        yield {axis: estimate.plan.size(axis) for axis in AXES}


def _memory(task: PlanTask) -> Changes:
    now = task.hardware.chip.hbm_gb_per_device * 1e9
    return _larger(task, "hbm_gb", lambda by: f"{human_bytes(by * now)} of memory per device")


def _links(task: PlanTask) -> Changes:
    inside, between = task.hardware.chip.intra_node_gb_per_s, task.hardware.chip.inter_node_gb_per_s
    if task.hardware.nodes > 1 and between is not None:
        return _larger(
            task, "inter_node_gb_per_s", lambda by: f"{by * between:g} GB/s between nodes"
        )
    return _larger(task, "link_gb_per_s", lambda by: f"{by * inside:g} GB/s between devices")


def _larger(task: PlanTask, figure: str, shown: Callable[[float], str]) -> Changes:
    """Return the task with a figure of its chip that is larger by each of the factors."""
    chip = task.hardware.chip
    chips = {by: replace(chip, **{figure: by * getattr(chip, figure)}) for by in FACTORS}
    hardware = {by: replace(task.hardware, chip=larger) for by, larger in chips.items()}
    return [(shown(by), replace(task, hardware=larger)) for by, larger in hardware.items()]


def _batch(task: PlanTask) -> Changes:
    sizes = [factor * task.global_batch_size for factor in (2, 4)]
    return [
        (f"a global batch of {size} samples", replace(task, global_batch_size=size))
        for size in sizes
    ]
