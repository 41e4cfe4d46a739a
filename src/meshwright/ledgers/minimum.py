"""The theoretical minimum: what a plan has to send per step, by its placed weights and events.

The ledger compares it with a compiled step, and the planner estimates times from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from meshwright.compiled.collectives import ring_bytes
from meshwright.ledgers.placed_program import (
    Part,
    PlacedEvent,
    PlacedWeight,
    place_events,
    place_weights,
    read_weights,
)
from meshwright.mesh.axes import CONTEXT, PIPE
from meshwright.pipeline.execute.tick_rows import OpCounts, TickOp
from meshwright.plan import Plan
from meshwright.program.dims.op import is_inexact, nbytes_of
from meshwright.program.jaxpr.equations import aval_of
from meshwright.program.kernels.context_attention import AttentionLayouts
from meshwright.program.kernels.passed_states import PassedStates
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.step.assemble import Assembled


class Needed(NamedTuple):
    """Collectives of one kind that a plan needs per step, each of a whole array of ``nbytes``."""

    axis: str
    kind: str
    nbytes: float
    times: float
    devices: int
    module: str = ""

    @property
    def sent_bytes(self) -> float:
        """Bytes each device sends per step."""
        return self.times * ring_bytes(self.kind, self.nbytes, self.devices)


class Stage(NamedTuple):
    """What one pipeline stage runs and sends per step.

    ``blocks`` is its share of them, ``messages`` are bytes and number of those to the stages next
    to it.
    """

    blocks: float
    embedding: int
    head: int
    messages: Sequence[tuple[float, float]] = ()

    def runs(self, part: Part | None, microbatches: int) -> float:
        """Return how often it runs a part of the model; a share of the blocks counts as one."""
        if part == "blocks":
            return microbatches * self.blocks
        return {"embedding": self.embedding, "head": self.head}.get(part or "", 0)


def activation_needs(
    events: Iterable[PlacedEvent],
    senders: Iterable[AttentionLayouts | PassedStates],
    plan: Plan,
    scale: float,
    stage: Stage | None,
) -> Iterator[Needed]:
    """Yield what is sent besides weights; ``scale`` is relative to the samples traced."""
    yield from _event_needs(events, plan, scale, stage)
    yield from _context_needs(senders, plan, scale)
    for nbytes, times in () if stage is None else stage.messages:
        yield Needed(PIPE, "collective-permute", nbytes, times, plan.size(PIPE))


def weight_needs(weight: PlacedWeight, plan: Plan, stage: Stage | None = None) -> Iterator[Needed]:
    """Yield how a weight is gathered and its gradient reduced; by one stage if there are stages."""
    if stage is not None and weight.parts != ("blocks",):
        yield from _outside_of_stages(weight, plan, stage)
        return
    batch, sharding = plan.batch, plan.sharding
    if stage is not None:
        weight = weight._replace(nbytes=weight.nbytes * stage.blocks)
    twice = weight.regathered and (weight.in_backward or sharding.remat != "none")
    passes = 2 if twice and not sharding.keep_gathered else 1
    yield from _gather(weight, plan, passes * batch.gradient_accumulation_steps)
    if weight.trained:
        times = batch.gradient_accumulation_steps // batch.sync_gradients_every
        yield from _reduction(weight, plan, times)
        yield from _gather_updated(weight, plan)


def _outside_of_stages(weight: PlacedWeight, plan: Plan, stage: Stage) -> Iterator[Needed]:
    """Yield the collectives of a weight of the embedding or the head, which no stage owns."""
    batch, stages = plan.batch, plan.size(PIPE)
    every = batch.sync_gradients_every
    for part in weight.parts:
        runs = int(stage.runs(part, batch.gradient_accumulation_steps))
        yield from _gather(weight, plan, runs)
        # Sums of a step cross the stages first, where each keeps its part.
        parts = stages if every > 1 and weight.on_pipe else 1
        yield from _reduction(weight._replace(nbytes=weight.nbytes / parts), plan, runs // every)
    shard = weight.nbytes / (plan.size("fsdp") if weight.on_fsdp else 1)
    if weight.trained:
        kind = "reduce-scatter" if weight.on_pipe else "all-reduce"
        summed = shard if plan.sharding.zero > 1 else weight.nbytes
        yield Needed(PIPE, kind, summed, 1, stages)
        yield from _gather_updated(weight._replace(module=""), plan)
    if weight.on_pipe:
        yield Needed(PIPE, "all-gather", shard, 1, stages)


def _gather(weight: PlacedWeight, plan: Plan, times: int) -> Iterator[Needed]:
    """Yield the gathers of a weight that is sharded between steps."""
    if weight.on_fsdp and plan.sharding.zero == 3:
        width = 1 if COMPUTE_DTYPES[plan.precision] is None else 0.5
        nbytes, fsdp = weight.nbytes * width, plan.size("fsdp")
        yield Needed("fsdp", "all-gather", nbytes, times, fsdp, weight.module)


def _gather_updated(weight: PlacedWeight, plan: Plan) -> Iterator[Needed]:
    """Yield the gather of a weight of which each device updates a shard, and all have the whole."""
    if weight.on_fsdp and plan.sharding.zero < 3:
        yield Needed("fsdp", "all-gather", weight.nbytes, 1, plan.size("fsdp"), weight.module)


def _reduction(weight: PlacedWeight, plan: Plan, times: int) -> Iterator[Needed]:
    """Yield how a gradient is reduced over the devices that have other samples or positions."""
    fsdp = plan.size("fsdp")
    weight = weight._replace(nbytes=weight.nbytes * weight.reduced)
    if fsdp > 1:
        sharded = weight.on_fsdp and plan.sharding.zero > 1
        kind = "reduce-scatter" if sharded else "all-reduce"
        yield Needed("fsdp", kind, weight.nbytes, times, fsdp, weight.module)
    nbytes = weight.nbytes / fsdp
    for axis in (CONTEXT, "data"):
        # Only one shard of each gradient goes over the slower axes.
        if (size := plan.size(axis)) > 1:
            yield Needed(axis, "all-reduce", nbytes, times, size, weight.module)
            nbytes /= size


def _event_needs(
    events: Iterable[PlacedEvent], plan: Plan, scale: float, stage: Stage | None
) -> Iterator[Needed]:
    """Yield what tensor parallelism sends."""
    steps, size = plan.batch.gradient_accumulation_steps, plan.size("tensor")
    scale /= plan.size(CONTEXT)
    for event in events:
        times = event.times * (steps if stage is None else stage.runs(event.part, steps))
        times *= 2 if event.again and plan.sharding.remat == "full" else 1
        if not times:
            continue
        need = Needed("tensor", event.kind, event.nbytes * scale, times, size, event.module)
        gather = need._replace(kind="all-gather", nbytes=event.weight)
        yield gather if event.weight and gather.sent_bytes <= need.sent_bytes else need


def _context_needs(
    senders: Iterable[AttentionLayouts | PassedStates], plan: Plan, scale: float
) -> Iterator[Needed]:
    """Yield what attention and scans send over the context axis."""
    steps, size = plan.batch.gradient_accumulation_steps, plan.size(CONTEXT)
    recomputes = plan.sharding.remat != "none"
    for one in senders:
        for kind, nbytes, forward in one.sent:
            # The backward pass of a block recomputes what it did not save.
            again = forward and (recomputes or (plan.gathers_twice and kind == "all-gather"))
            times = one.times * steps * (2 if again else 1)
            yield Needed(CONTEXT, kind, nbytes * scale, times, size, one.module)


def needed_by_stage(assembled: Assembled, counts: OpCounts | None) -> list[list[Needed]]:
    """Return what each pipeline stage needs to send per step; one list without stages."""
    plan, decision, pipeline = assembled.plan, assembled.decision, assembled.step.pipeline
    cut = None if pipeline is None else pipeline.cut
    traced = assembled.traced if cut is None else cut.traced
    steps, reads = assembled.traced.layout.step_leaves, read_weights(traced)
    weights = list(place_weights(steps, decision.optimizer, plan, reads, cut))
    events = place_events(decision.classes, decision.tensor, cut)
    senders, scale = decision.exchanges.senders, 1 / plan.batch.replicas
    return [
        [
            *(need for weight in weights for need in weight_needs(weight, plan, stage)),
            *activation_needs(events, senders, plan, scale, stage),
        ]
        for stage in _stages(assembled, counts)
    ]


def _stages(assembled: Assembled, counts: OpCounts | None) -> Iterator[Stage | None]:
    """Yield what each pipeline stage runs; None without stages."""
    pipeline = assembled.step.pipeline
    if pipeline is None or counts is None:
        yield None
        return
    avals = [aval_of(variable) for variable in pipeline.cut.scan.final]
    replicas, runs = assembled.plan.batch.replicas, counts.counts
    ahead = sum(map(nbytes_of, avals)) / replicas
    back = sum(nbytes_of(aval) for aval in avals if is_inexact(aval)) / replicas
    for number in range(counts.num_stages):
        yield Stage(
            blocks=len(pipeline.division.blocks(number)) / pipeline.cut.num_blocks,
            embedding=runs[TickOp.EMBEDDING][number],
            head=runs[TickOp.HEAD][number],
            messages=((ahead, runs[TickOp.SEND][number]), (back, runs[TickOp.SEND_BACK][number])),
        )
