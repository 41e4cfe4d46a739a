"""The best plans for other numbers of devices: how speed grows, and how few hold the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.errors import UserError
from meshwright.hardware import Hardware
from meshwright.planner.estimate.estimate import Estimate, tied_with
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.search.candidates import FixedSettings, PlanTask, Sizes, all_sizes
from meshwright.planner.search.search import SearchResult, search

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
    possible = [
        count
        for count in range(1, total + 1)
        if total % count == 0 and (count % per_node == 0 or per_node % count == 0)
    ]
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
    every = list(all_sizes(count, {}))
    alike = [] if larger is None else [sizes for sizes in every if _alike(sizes, larger)]
    for meshes in filter(None, (alike, every)):
        try:
            plans = search(estimator, asked, top=1, meshes=meshes).plans
        except UserError:
            # None of these meshes divides the model and the batch.
            continue
        if plans:
            return plans[0]
    return None


def _alike(sizes: Sizes, larger: Estimate) -> bool:
    return all(size <= max(8, 2 * larger.plan.size(axis)) for axis, size in sizes.items())


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
