"""What the devices of each mesh axis have to send per update, and how long that takes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.compiled.collectives import ring_bytes
from meshwright.hardware import Hardware
from meshwright.plan import Plan
from meshwright.planner.devices.links import AxisLink, axis_links, collective_seconds
from meshwright.planner.estimate.estimate import AxisTraffic
from meshwright.planner.estimate.placed_state import PlacedState, WeightKind
from meshwright.planner.workload.gpu_rules import HIDDEN_TRAFFIC
from meshwright.program.dims import ShardingEvent
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over one axis.

    Attributes:
        axis: the mesh axis.
        kind: such as all-gather.
        nbytes: bytes of the whole array.
        times: how often per update.
    """

    axis: str
    kind: str
    nbytes: float
    times: float = 1.0


def weight_traffic(state: PlacedState, plan: Plan, num_blocks: int) -> Iterator[Sent]:
    """Yield how weights are gathered and gradients reduced.

    Args:
        state: which part of each a device has.
        plan: the plan.
        num_blocks: the number of repeated blocks.
    """
    sharding, steps = plan.sharding, plan.batch.gradient_accumulation_steps
    reductions = steps // plan.batch.sync_gradients_every
    width = 0.5 if COMPUTE_DTYPES[plan.precision] is not None else 1.0
    fsdp, data = plan.size("fsdp"), plan.size("data")
    own_blocks = math.ceil(num_blocks / plan.size("pipe"))
    for weight, count in _joined(state.weights, own_blocks):
        if weight.gathered and sharding.zero == 3:
            passes = 2 if weight.in_block and not sharding.keep_gathered else 1
            yield Sent("fsdp", "all-gather", weight.nbytes * width, count * steps * passes)
        if not weight.trained:
            continue
        if fsdp > 1:
            kind = "reduce-scatter" if weight.scattered else "all-reduce"
            yield Sent("fsdp", kind, weight.reduced, count * reductions)
            if sharding.zero < 3:
                yield Sent("fsdp", "all-gather", weight.nbytes, count)
        if data > 1:
            # Only one fsdp shard of each gradient goes over the slower axis.
            yield Sent("data", "all-reduce", weight.reduced / fsdp, count * reductions)


def _joined(weights: Mapping[WeightKind, int], num_blocks: int) -> Iterator[tuple[WeightKind, int]]:
    """Yield what is sent together, and how often: the weights of a block, and any other weight."""
    blocks: defaultdict[tuple[bool, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for weight, count in weights.items():
        if not weight.in_block or not num_blocks:
            yield weight, count
            continue
        total = blocks[weight.gathered, weight.trained, weight.scattered]
        total[0] += count * weight.nbytes / num_blocks
        total[1] += count * weight.reduced / num_blocks
    for (gathered, trained, scattered), (nbytes, reduced) in blocks.items():
        yield WeightKind(nbytes, reduced, gathered, True, trained, scattered), num_blocks


def tensor_traffic(events: Iterable[ShardingEvent], plan: Plan, rows: float) -> Iterator[Sent]:
    """Yield what tensor parallelism reduces: one array per half block and pass.

    Args:
        events: what costs communication along the divided dims, for the samples traced.
        plan: the plan.
        rows: a device's samples of a microbatch, relative to those traced.
    """
    seen: set[tuple[str, int]] = set()
    steps = plan.batch.gradient_accumulation_steps
    for event in events:
        key = (event.kind, event.source)
        if event.source >= 0 and key in seen:
            continue
        seen.add(key)
        kind = "all-gather" if event.blocking else "all-reduce"
        # Stages divide the iterations of a loop over blocks.
        times = math.ceil(event.times / plan.size("pipe"))
        yield Sent("tensor", kind, event.nbytes * rows, times * steps)


class OutsideOfStages(NamedTuple):
    """Bytes of what is outside of stages, such as an embedding, on each of them.

    Attributes:
        gradients: of gradients, as fsdp divides them.
        parameters: of parameters, gathered over the stages.
    """

    gradients: float
    parameters: float


def stage_traffic(carry: float, messages: int, outside: OutsideOfStages) -> Iterator[Sent]:
    """Yield what stages send to each other.

    Args:
        carry: bytes of the activations that one block hands to the next.
        messages: activations and gradients that a stage sends.
        outside: what is outside of stages, of which each keeps a part between updates.
    """
    yield Sent("pipe", "collective-permute", carry, messages)
    yield Sent("pipe", "all-gather", outside.parameters)
    yield Sent("pipe", "reduce-scatter", outside.gradients)


def time_traffic(
    sent: Iterable[Sent], plan: Plan, hardware: Hardware, compute: float
) -> dict[str, AxisTraffic]:
    """Return how long all of it takes, by axis.

    Args:
        sent: the collectives.
        plan: the plan.
        hardware: the devices and their links.
        compute: seconds of computing, behind which a part of it can run.
    """
    links = _links(hardware, tuple(plan.mesh.items()))
    sums: dict[str, list[float]] = {}
    alike: defaultdict[tuple[str, str, float], float] = defaultdict(float)
    for each in sent:
        if each.axis in links:
            alike[each.axis, each.kind, each.nbytes] += each.times
    for (axis, kind, nbytes), times in alike.items():
        total = sums.setdefault(axis, [0.0, 0.0])
        total[0] += times * ring_bytes(kind, nbytes, links[axis].size)
        total[1] += times * collective_seconds(kind, nbytes, links[axis], hardware)
    traffic: dict[str, AxisTraffic] = {}
    room = compute
    for axis, (nbytes, seconds) in sums.items():
        hidden = min(HIDDEN_TRAFFIC.value[plan.sharding.blocks].get(axis, 0.0) * seconds, room)
        room -= hidden
        traffic[axis] = AxisTraffic(nbytes, seconds, seconds - hidden)
    return traffic


@lru_cache(maxsize=4096)
def _links(hardware: Hardware, mesh: tuple[tuple[str, int], ...]) -> dict[str, AxisLink]:
    return axis_links(hardware, dict(mesh))
