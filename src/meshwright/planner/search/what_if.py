"""The best plans for other hardware: more or fewer devices, more memory, faster links, batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import UserError
from meshwright.hardware import Hardware
from meshwright.mesh.axes import AXES, describe_sizes, divisors
from meshwright.planner.estimate.estimate import Estimate, tied_with
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.search.candidates import FixedSettings, PlanTask, all_sizes
from meshwright.planner.search.search import SearchResult, search
from meshwright.text.units import human_bytes, human_seconds

MOST_POINTS = 6


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan for a number of devices.

    The estimate is None if nothing fits, and the efficiency is the speed per device, relative to
    the fewest devices that hold the model.
    """

    num_devices: int
    estimate: Estimate | None = None
    tokens_per_second: float = 0.0
    efficiency: float = 0.0


def scaling_curve(
    estimator: Estimator, task: PlanTask, best: Estimate | None = None
) -> list[ScalingPoint]:
    """Return the best plans from one device to all of them, for the same global batch.

    ``best`` is the one for all devices if it is known; sizes of the mesh are free for fewer.
    """
    counts = device_counts(task.hardware.count, task.hardware.devices_per_node)
    found = dict[int, Estimate | None]()
    for count in reversed(counts):
        if count == task.hardware.count and best is not None:
            found[count] = best
        else:
            larger = next((known for known in reversed(found.values()) if known), None)
            found[count] = _best(estimator, task, count, larger)
    fewest = next((found[count] for count in counts if found[count]), None)
    tokens = task.global_batch_size * estimator.tokens_per_sample
    return [_point(count, found[count], fewest, tokens) for count in counts]


def _point(count: int, best: Estimate | None, fewest: Estimate | None, tokens: int) -> ScalingPoint:
    """Return the point of a plan, compared with that of the fewest devices."""
    if best is None or fewest is None:
        return ScalingPoint(count)
    efficiency = fewest.time.step / (count / fewest.plan.num_devices * best.time.step)
    return ScalingPoint(count, best, tokens / best.time.step, efficiency)


def enough_devices(points: Sequence[ScalingPoint]) -> ScalingPoint | None:
    """Return the fewest devices that tie with the fastest number; None if all are needed."""
    steps = [point.estimate.time.step if point.estimate else math.inf for point in points]
    most = tied_with(min(steps))
    fewer = zip(points[:-1], steps, strict=False)
    return next((point for point, step in fewer if step <= most), None)


def device_counts(total: int, per_node: int) -> list[int]:
    """Return up to seven numbers of devices from one to all, each at least twice the one before.

    All are parts of a node or whole nodes, and divide the total.
    """
    possible = [n for n in divisors(total) if n % per_node == 0 or per_node % n == 0]
    for factor in (2, 4, 8, 16):
        chosen = [total]
        for count in reversed(possible):
            if count * factor <= chosen[-1]:
                chosen.append(count)
        if len(chosen) <= MOST_POINTS:
            break
    return sorted({1, *chosen})


def _best(
    estimator: Estimator, task: PlanTask, count: int, larger: Estimate | None
) -> Estimate | None:
    """Return the best plan for fewer devices: of meshes like the best one for more, if one fits."""
    fixed = FixedSettings(
        remat=task.fixed.remat,
        blocks=task.fixed.blocks,
        schedule=task.fixed.schedule,
        micro_batch_size=task.fixed.micro_batch_size,
    )
    asked = replace(task, hardware=smaller_or_larger(task.hardware, count), fixed=fixed)
    every = list(all_sizes(count, {}, tokens=estimator.tokens_per_sample))
    most = {} if larger is None else {axis: max(8, 2 * larger.plan.size(axis)) for axis in AXES}
    alike = [sizes for sizes in every if most and all(sizes[axis] <= most[axis] for axis in AXES)]
    for meshes in filter(None, (alike, every)):
        try:
            plans = search(estimator, asked, top=1, meshes=meshes).plans
        except UserError:
            # None of these meshes divides the model and the batch.
            continue
        if plans:
            return plans[0]
    return None


MOST_DEVICES = 16_384
"""A model that needs more is not searched for."""


def smaller_or_larger(hardware: Hardware, count: int) -> Hardware:
    """Return this many devices of the same kind, in nodes of the same size."""
    node = hardware.devices_per_node if hardware.nodes > 1 else hardware.chip.devices_per_domain
    nodes = 1 if node is None else -(-count // node)
    return Hardware(chip=hardware.chip, count=count, nodes=nodes)


def smallest_cluster(estimator: Estimator, task: PlanTask) -> SearchResult | None:
    """Return a search on the fewest devices of the chip that hold the model; None if none do.

    The mesh is free, and there is at least one sample for each device. Clusters of more than one
    node have whole nodes.
    """
    node, count = task.hardware.chip.devices_per_domain or MOST_DEVICES, 1
    while count <= min(node, MOST_DEVICES):
        if found := _holds(estimator, task, count):
            return found
        count *= 2
    return _fewest_nodes(estimator, task, node)


def _fewest_nodes(estimator: Estimator, task: PlanTask, node: int) -> SearchResult | None:
    """Double the nodes until the model fits, then look for fewer between the last two."""
    nodes, found = 1, None
    while found is None:
        nodes *= 2
        if nodes * node > MOST_DEVICES:
            return None
        found = _holds(estimator, task, nodes * node)
    low, high = nodes // 2, nodes
    while high - low > 1:
        middle = (low + high) // 2
        fewer = _holds(estimator, task, middle * node)
        low, high, found = (low, middle, fewer) if fewer else (middle, high, found)
    return found


def _holds(estimator: Estimator, task: PlanTask, count: int) -> SearchResult | None:
    """Return a search on this many devices if a plan fits."""
    batch = -(-max(task.global_batch_size, count) // count) * count
    asked = replace(
        task,
        hardware=smaller_or_larger(task.hardware, count),
        global_batch_size=batch,
        fixed=FixedSettings(remat=task.fixed.remat, blocks=task.fixed.blocks),
    )
    try:
        result = search(estimator, asked, top=1)
    except UserError:
        # No mesh of this many devices divides the model.
        return None
    return result if result.plans else None


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
    tried = (
        WhatIf(change, result.best, _decision(estimator, result, task))
        for change, task in (changes[-1], *changes[:-1])
    )
    farthest = next(tried)
    if farthest.after is None:
        return farthest
    return next((each for each in tried if each.after is not None), farthest)


def _decision(estimator: Estimator, result: SearchResult, task: PlanTask) -> Estimate | None:
    """Return the best plan after a change, with the same mesh if it ties; None if none fits."""
    # A change may favour meshes that are ranked, slower, or a little too large.
    near = (*result.plans, *result.slower()[:NEAREST], *result.too_large()[:NEAREST])
    meshes = [{axis: estimate.plan.size(axis) for axis in AXES} for estimate in near]
    plans = search(estimator, task, top=1, meshes=meshes).plans
    if not plans:
        return None
    mesh = {axis: result.best.plan.size(axis) for axis in AXES}
    own = search(estimator, task, top=1, meshes=[mesh]).plans
    return own[0] if own and own[0].time.step <= tied_with(plans[0].time.step) else plans[0]


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
    return [
        (f"a global batch of {size} samples", replace(task, global_batch_size=size))
        for size in (2 * task.global_batch_size, 4 * task.global_batch_size)
    ]
