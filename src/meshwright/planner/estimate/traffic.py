"""What the devices of each mesh axis have to send per step, and how long that takes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from meshwright.compiled.collectives import ring_bytes
from meshwright.hardware import Hardware
from meshwright.ledgers.minimum import Needed, Stage, activation_needs, weight_needs
from meshwright.ledgers.placed_program import PlacedEvent, PlacedWeight
from meshwright.mesh.axes import CONTEXT, MODEL_AXES, PIPE
from meshwright.plan import Plan
from meshwright.planner.devices.links import AxisLink, axis_links, collective_seconds
from meshwright.planner.estimate.estimate import AxisTraffic
from meshwright.planner.workload.gpu_rules import HIDDEN_TRAFFIC
from meshwright.program.kernels.context_attention import AttentionLayouts


def sent_by_stages(
    weights: Mapping[PlacedWeight, int],
    events: Sequence[PlacedEvent],
    plan: Plan,
    *,
    attention: Sequence[AttentionLayouts] = (),
    scale: float,
    num_blocks: int,
    messages: tuple[float, float],
) -> list[list[Needed]]:
    """Return what a plan sends: its first and its last stage, or all devices without stages.

    ``weights`` says how many are placed alike, ``scale`` is a device's samples of a microbatch
    relative to those traced, and ``messages`` are bytes and number of the messages of the stage
    that sends most of them.
    """
    own_blocks = math.ceil(num_blocks / plan.size("pipe"))
    stages: list[Stage | None] = [None]
    if plan.size("pipe") > 1:
        share, runs = own_blocks / max(1, num_blocks), plan.batch.gradient_accumulation_steps
        stages = [Stage(share, runs, 0, [messages]), Stage(share, 0, runs, [messages])]
    return [
        [
            *_weights_together(weights, plan, stage, own_blocks),
            *activation_needs(events, attention, plan, scale, stage),
        ]
        for stage in stages
    ]


def _weights_together(
    weights: Mapping[PlacedWeight, int], plan: Plan, stage: Stage | None, own_blocks: int
) -> Iterator[Needed]:
    """Yield what is sent for weights, as few collectives as compilers make of it.

    The weights of a block are sent together, and so is what all stages exchange.
    """
    together: dict[tuple[str, str, int, bool], tuple[float, float]] = {}
    scatters = plan.sharding.zero > 1
    for weight, count in weights.items():
        blocks = own_blocks if weight.parts == ("blocks",) else 0
        for need in weight_needs(weight, plan, stage):
            if not blocks and need.axis != PIPE:
                yield need._replace(times=need.times * count)
            elif need.times:
                scattered = scatters and weight.on_fsdp and need.axis != PIPE
                key = need.axis, need.kind, blocks or 1, scattered
                nbytes, times = together.get(key, (0.0, 0.0))
                nbytes += count * need.nbytes * need.times
                together[key] = nbytes, max(times, need.times)
    for (axis, kind, blocks, _), (nbytes, times) in together.items():
        launches = times * blocks
        yield Needed(axis, kind, nbytes / launches, launches, plan.size(axis))


def time_traffic(
    stages: Iterable[Iterable[Needed]], plan: Plan, hardware: Hardware, compute: float
) -> dict[str, AxisTraffic]:
    """Return how long all of it takes, by axis; some of it runs behind ``compute``."""
    links = _links(hardware, tuple(plan.mesh.items()))
    by_stage = [_sums(sent, links, hardware) for sent in stages]
    traffic: dict[str, AxisTraffic] = {}
    room = compute
    shares = HIDDEN_TRAFFIC.value[plan.sharding.blocks]
    for axis in dict.fromkeys((*shares, *MODEL_AXES, CONTEXT)):
        sums = [stage[axis] for stage in by_stage if axis in stage]
        if sums:
            nbytes, seconds = max(sums)
            hidden = min(shares.get(axis, 0.0) * seconds, room)
            room -= hidden
            traffic[axis] = AxisTraffic(nbytes, seconds, seconds - hidden)
    return traffic


def _sums(
    sent: Iterable[Needed], links: Mapping[str, AxisLink], hardware: Hardware
) -> dict[str, tuple[float, float]]:
    """Return the bytes that a stage sends over each axis, and the seconds they take."""
    alike: defaultdict[tuple[str, str, float], float] = defaultdict(float)
    for each in sent:
        if each.axis in links:
            alike[each.axis, each.kind, each.nbytes] += each.times
    sums: dict[str, tuple[float, float]] = {}
    for (axis, kind, whole), times in alike.items():
        nbytes, seconds = sums.get(axis, (0.0, 0.0))
        once = collective_seconds(kind, whole, links[axis], hardware)
        nbytes += times * ring_bytes(kind, whole, links[axis].size)
        sums[axis] = nbytes, seconds + times * once
    return sums


@lru_cache(maxsize=4096)
def _links(hardware: Hardware, mesh: tuple[tuple[str, int], ...]) -> dict[str, AxisLink]:
    return axis_links(hardware, dict(mesh))
