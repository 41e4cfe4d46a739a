"""The smallest cluster of a chip that holds a model."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import UserError
from meshwright.hardware import Hardware
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.search.candidates import Pins, PlanTask
from meshwright.planner.search.search import SearchResult, search

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
    node = smaller_or_larger(task.hardware, 1).chip.devices_per_domain or MOST_DEVICES
    counts = [count for count in _doubling(min(node, MOST_DEVICES)) if count <= node]
    for count in counts:
        if found := _holds(estimator, task, count):
            return found
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
        pins=Pins(remat=task.pins.remat, blocks=task.pins.blocks),
    )
    try:
        result = search(estimator, asked, top=1)
    except UserError:
        # No mesh of this many devices divides the model.
        return None
    return result if result.plans else None


def _doubling(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
