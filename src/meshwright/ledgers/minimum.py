"""The theoretical minimum: what a plan has to send per update, axis by axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.compiled.collectives import ring_bytes
from meshwright.plan import Plan
from meshwright.program.blocks.block_lists import Outside, cut_segments
from meshwright.program.blocks.to_scan import casts_of
from meshwright.program.dims import ShardingEvent
from meshwright.program.evaluate.dependencies import variables_read
from meshwright.program.jaxpr.equations import Literal, scan_counts
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.weight_reads import weights_in_backward
from meshwright.sharding.placement import Placement
from meshwright.step.assemble import Assembled


@dataclass(frozen=True)
class Needed:
    """One collective that a plan needs.

    Attributes:
        axis: the mesh axis.
        kind: all-gather, reduce-scatter or all-reduce.
        sent_bytes: bytes each device sends per update.
        module: the module it belongs to.
    """

    axis: str
    kind: str
    sent_bytes: float
    module: str


def needed_collectives(assembled: Assembled) -> list[Needed]:
    """Return every collective the plan needs per update."""
    return [*_weights(assembled), *_activations(assembled)]


def _weights(assembled: Assembled) -> Iterator[Needed]:
    plan, decision = assembled.plan, assembled.decision
    times = plan.batch.gradient_accumulation_steps
    gathered_once = _gathered_once(assembled)
    compute = COMPUTE_DTYPES[plan.precision]
    for number, step in enumerate(assembled.traced.layout.step_leaves):
        if not step.leaf.is_weight:
            continue
        placed = decision.optimizer[number]
        whole = step.leaf.nbytes / (plan.size("tensor") if "tensor" in placed.axes() else 1)
        module = step.leaf.path.rpartition(".")[0]
        if number in decision.gathers:
            use = whole * (2 / 4 if compute is not None else 1)
            gathers = 1 if number in gathered_once else 2
            sent = ring_bytes("all-gather", use, plan.size("fsdp"))
            yield Needed("fsdp", "all-gather", times * gathers * sent, module)
        if step.leaf.role == "param":
            yield from reduction(placed, whole, plan, module)


def reduction(
    placed: Placement, whole: float, plan: Plan, module: str, times: int | None = None
) -> Iterator[Needed]:
    """Yield how one gradient is reduced over the devices that have other samples.

    Args:
        placed: the placement of its optimizer state.
        whole: its bytes, those of a device's part if the tensor axis divides it.
        plan: the plan.
        module: the module of the parameter.
        times: reductions per update; by default as the plan says.
    """
    if times is None:
        times = plan.batch.gradient_accumulation_steps // plan.batch.sync_gradients_every
    fsdp, data = plan.size("fsdp"), plan.size("data")
    divided = "fsdp" in placed.axes() and plan.sharding.zero > 1
    if fsdp > 1:
        kind = "reduce-scatter" if divided else "all-reduce"
        yield Needed("fsdp", kind, times * ring_bytes(kind, whole, fsdp), module)
        if "fsdp" in placed.axes() and plan.sharding.zero < 3:
            sent = ring_bytes("all-gather", whole, fsdp)
            yield Needed("fsdp", "all-gather", sent, module)
    if data > 1:
        # Only one fsdp shard of each gradient goes over the slower axis.
        sent = ring_bytes("all-reduce", whole / fsdp, data)
        yield Needed("data", "all-reduce", times * sent, module)


def _activations(assembled: Assembled) -> Iterator[Needed]:
    times = assembled.plan.batch.gradient_accumulation_steps
    for _, need in activations(assembled):
        yield replace(need, sent_bytes=times * need.sent_bytes)


def activations(assembled: Assembled) -> Iterator[tuple[ShardingEvent, Needed]]:
    """Yield what tensor parallelism needs per microbatch: one reduction per half block and way."""
    plan, classes, tensor = assembled.plan, assembled.decision.classes, assembled.decision.tensor
    if tensor.size == 1:
        return
    seen: set[tuple[str, int]] = set()
    for event in classes.events_of(tensor.splits):
        key = (event.kind, event.source)
        if event.source >= 0 and key in seen:
            continue
        seen.add(key)
        kept = bool(event.kept & tensor.splits.keys())
        kind = "all-gather" if event.blocking else "reduce-scatter" if kept else "all-reduce"
        sent = ring_bytes(kind, event.total / plan.batch.replicas, tensor.size)
        if event.weight:
            gathered = ring_bytes("all-gather", event.weight * event.times, tensor.size)
            sent, kind = min((sent, kind), (gathered, "all-gather"))
        yield event, Needed("tensor", kind, sent, event.path)


def _gathered_once(assembled: Assembled) -> set[int]:
    """Return the leaves that are gathered once, because they are kept or not read again."""
    decision, traced = assembled.decision, assembled.traced
    if assembled.plan.sharding.keep_gathered:
        return set(decision.gathers)
    jaxpr = traced.closed.jaxpr
    count = len(traced.layout.step_leaves)
    number = {v: n for n, v in enumerate(jaxpr.invars[:count])}
    casts = casts_of(jaxpr.eqns, set(number))
    number |= {cast: number[leaf] for cast, leaf in casts.items()}
    once: set[int] = set()
    if assembled.plan.sharding.remat == "none":
        once |= set(decision.gathers) - weights_in_backward(traced)
    for segment in cut_segments(jaxpr):
        if not isinstance(segment, Outside):
            continue
        eqns = [eqn for eqn in segment.eqns if not casts.keys() & set(eqn.outvars)]
        for variable in variables_read(eqns):
            if variable in number and not _scanned(variable, segment):
                once.add(number[variable])
    return once


def _scanned(variable: object, segment: Outside) -> bool:
    """Whether a scan runs over the rows of a variable, such as the weights of rolled blocks."""
    return any(
        not isinstance(atom, Literal) and atom is variable
        for eqn in segment.eqns
        if eqn.primitive.name == "scan"
        for atom in eqn.invars[sum(scan_counts(eqn)) :]
    )
