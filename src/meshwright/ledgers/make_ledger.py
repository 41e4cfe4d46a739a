"""The ledger of a step: compile it, list its collectives, and compare with the minimum."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax

from meshwright.compiled.collectives import Collective, read_collectives
from meshwright.compiled.compile_program import CompiledProgram, compile_program
from meshwright.data.batches import read_batch
from meshwright.errors import UserError
from meshwright.ledgers.axis_shares import family, shares
from meshwright.ledgers.excess_reasons import Reason, Reasons, explain
from meshwright.ledgers.ledger_records import (
    AxisLedger,
    Explanation,
    Ledger,
    Line,
    ModuleLedger,
)
from meshwright.ledgers.minimum import Needed, needed_collectives
from meshwright.ledgers.overlap import Overlaps, read_overlaps
from meshwright.ledgers.stage_minimum import needed_by_stage
from meshwright.pipeline.execute.tick_rows import OpCounts, count_operations
from meshwright.program.weight_reads import weight_reads
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled
from meshwright.text.units import a_type

_Explained = Sequence[tuple[Collective, Reason | None]]
"""The collectives of a stage, and why they are sent where it is not for the minimum."""


class Assembles(Protocol):
    """Whatever builds a step for a batch, as a `Trainer` does."""

    def assemble(self, batch: Any) -> Assembled:
        """Build the step for batches of this shape."""
        ...


def ledger(trainer: Assembles, batch: Any) -> Ledger:
    """Compile a trainer's step without running it, and list what it sends.

    Args:
        trainer: the `Trainer`.
        batch: a global batch, or its shapes as `jax.ShapeDtypeStruct`.

    Returns:
        the bytes sent over each mesh axis and by each module, next to the theoretical minimum;
        ``print`` shows them as tables.
    """
    if not callable(getattr(trainer, "assemble", None)):
        raise UserError(
            f"the ledger is asked of {a_type(trainer)}",
            why="the step that it compiles is built by a trainer",
            fix="write mw.ledger(mw.Trainer(model=…, loss=…, optimizer=…, mesh=…), batch)",
        )
    batch = read_batch(batch)
    return make_ledger(trainer.assemble(batch), batch)


@activity("compiling the step")
def make_ledger(assembled: Assembled, batch: Any) -> Ledger:
    """Compile the step for batches of this shape, without running it, and list what it sends."""
    lowered = lower_step(assembled, batch)
    started = time.perf_counter()
    program = compile_program(lowered)
    return read_ledger(assembled, program, compile_seconds=time.perf_counter() - started)


def lower_step(assembled: Assembled, batch: Any) -> Any:
    """Lower the step for batches of this shape, ready to be compiled."""
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=assembled.step.shardings.batch)
        for leaf in jax.tree.leaves(batch)
    ]
    return assembled.step.lower(leaves)


def read_ledger(
    assembled: Assembled, program: CompiledProgram, *, compile_seconds: float
) -> Ledger:
    """List what a compiled step sends."""
    mesh = dict(assembled.mesh.shape)
    counts = _operation_counts(assembled)
    # One device sends nothing, and the text of a large program takes a second to read.
    alone = all(size == 1 for size in mesh.values())
    found = [] if alone else read_collectives(program.partitioned, mesh)
    stages = _by_stage(found, counts)
    needed = _needed(assembled, counts)
    platform = assembled.mesh.devices.flat[0].platform
    overlaps = read_overlaps(program, mesh, platform, lambda c, stage: _times(c, counts, stage))
    memory = program.memory
    reasons = Reasons(weight_reads(assembled.traced), mesh)
    explained = [reasons.of(stage) for stage in stages]
    axes = {
        axis: _axis(axis, mesh, explained, needed, overlaps)
        for axis, size in mesh.items()
        if size > 1
    }
    totals = [sum(c.sent_bytes for c in stage) for stage in stages]
    sent = max(totals)
    largest = totals.index(sent)
    minimum = sum(n.sent_bytes for n in needed[largest])
    return Ledger(
        mesh=assembled.plan.mesh,
        ratio=_ratio(sent, minimum),
        sent_bytes=round(sent),
        minimum_bytes=round(minimum),
        axes=axes,
        lines=_lines(max(same, key=lambda c: c.count) for same in zip(*stages, strict=True)),
        argument_bytes=memory.argument,
        temp_bytes=memory.temp,
        compile_seconds=round(compile_seconds, 2),
        not_overlapped=overlaps.exposed(largest),
        overlap_unknown=overlaps.unknown,
    )


def _axis(
    axis: str,
    mesh: dict[str, int],
    stages: Sequence[_Explained],
    needed: Sequence[Sequence[Needed]],
    overlaps: Overlaps,
) -> AxisLedger:
    minimum_by_module: dict[tuple[str, str], float] = defaultdict(float)
    by_stage = [_sent_over(axis, mesh, (c for c, _ in stage)) for stage in stages]
    totals = [sum(stage.values()) for stage in by_stage]
    largest = totals.index(max(totals))
    sent = by_stage[largest]
    own = [need for need in needed[largest] if need.axis == axis]
    for need in own:
        minimum_by_module[_part(need.module), family(need.kind)] += need.sent_bytes
    total, minimum = sum(sent.values()), sum(minimum_by_module.values())
    overlap = overlaps.of_axis(axis, mesh, largest)
    during = sum(kind.overlapped_bytes for kind in overlap.values())
    return AxisLedger(
        size=mesh[axis],
        sent_bytes=round(total),
        minimum_bytes=round(minimum),
        ratio=_ratio(total, minimum),
        excess=_excess(sent, minimum_by_module, minimum),
        modules=_modules(
            sent,
            minimum_by_module,
            _found(axis, mesh, stages[largest], own),
        ),
        overlapped_bytes=None if overlaps.unknown else during,
        overlapped=_ratio(during, sum(kind.sent_bytes for kind in overlap.values())),
        overlap=overlap,
    )


def _operation_counts(assembled: Assembled) -> OpCounts | None:
    """Return how often each stage runs the operations of a tick; None without stages."""
    pipeline, plan = assembled.step.pipeline, assembled.plan
    if pipeline is None:
        return None
    rounds = plan.batch.gradient_accumulation_steps // plan.num_microbatches
    return count_operations(pipeline.schedule, plan.num_microbatches, plan.size("pipe"), rounds)


def _times(collective: Collective, counts: OpCounts | None, stage: int) -> int:
    """Return how often a stage runs a collective."""
    if counts is None:
        return collective.count
    return counts.times(collective.op_name, collective.count, stage)


def _by_stage(collectives: list[Collective], counts: OpCounts | None) -> list[list[Collective]]:
    """Return what each pipeline stage sends; one list without stages."""
    return [
        [replace(c, count=_times(c, counts, stage)) for c in collectives]
        for stage in range(counts.num_stages if counts else 1)
    ]


def _needed(assembled: Assembled, counts: OpCounts | None) -> list[list[Needed]]:
    """Return what each pipeline stage needs to send; one list without stages."""
    pipeline = assembled.step.pipeline
    if pipeline is None or counts is None:
        return [needed_collectives(assembled)]
    return needed_by_stage(assembled, pipeline, counts)


def _sent_over(
    axis: str, mesh: dict[str, int], collectives: Iterable[Collective]
) -> dict[tuple[str, str], float]:
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for collective in collectives:
        share = shares(collective, mesh).get(axis, 0.0)
        sent[_part(collective.module), family(collective.kind)] += share
    return sent


def _part(module: str) -> str:
    """Return the part of the model a layer belongs to: query, key and value share a reduction."""
    return module.rpartition(".")[0] or module


def _excess(
    sent: dict[tuple[str, str], float],
    minimum_by_module: dict[tuple[str, str], float],
    minimum: float,
) -> list[str]:
    """Describe the bytes that modules send beyond the minimum, largest first."""
    over = {key: value - minimum_by_module.get(key, 0.0) for key, value in sent.items()}
    large = {key: value for key, value in over.items() if value > _negligible(minimum)}
    ordered = sorted(large.items(), key=lambda item: -item[1])
    return [
        f"{module or 'outside modules'}: {kind} of {value:,.0f} bytes beyond the minimum"
        for (module, kind), value in ordered
    ]


def _negligible(minimum: float) -> float:
    """Return the bytes of a module that are not worth a line."""
    return max(minimum, 1.0) * 1e-3


def _found(
    axis: str, mesh: dict[str, int], collectives: _Explained, needed: Iterable[Needed]
) -> list[tuple[str, Explanation]]:
    """Return why modules send more than the plan needs, as the program shows it."""
    parts: dict[tuple[str, str], list[tuple[Reason | None, float]]] = defaultdict(list)
    for collective, reason in collectives:
        share = shares(collective, mesh).get(axis, 0.0)
        parts[_part(collective.module), family(collective.kind)].append((reason, share))
    least: dict[tuple[str, str], float] = defaultdict(float)
    for need in needed:
        least[_part(need.module), family(need.kind)] += need.sent_bytes
    negligible = _negligible(sum(least.values()))
    return [
        (module, Explanation(sent_bytes=round(size), reason=reason))
        for (module, family), sent in parts.items()
        for reason, size in explain(sent, least[module, family], negligible).items()
    ]


def _modules(
    sent: dict[tuple[str, str], float],
    minimum: dict[tuple[str, str], float],
    explanations: Iterable[tuple[str, Explanation]],
) -> dict[str, ModuleLedger]:
    """Return what each module sends, largest first."""
    explained: dict[str, list[Explanation]] = defaultdict(list)
    for module, explanation in explanations:
        explained[module].append(explanation)
    over: dict[str, dict[str, int]] = defaultdict(dict)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for module, kind in dict.fromkeys([*sent, *minimum]):
        here, least = sent.get((module, kind), 0.0), minimum.get((module, kind), 0.0)
        totals[module][0] += here
        totals[module][1] += least
        if round(here - least):
            over[module][kind] = round(here - least)
    return {
        module: ModuleLedger(
            sent_bytes=round(here),
            minimum_bytes=round(least),
            kinds=over[module],
            explained=explained[module],
        )
        for module, (here, least) in sorted(totals.items(), key=lambda item: -item[1][0])
        if round(here) or round(least)
    }


def _lines(collectives: Iterable[Collective]) -> list[Line]:
    groups: dict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[c.axes, c.kind, c.module, c.phase].append(c)
    return [
        Line(
            axes=list(axes),
            kind=kind,
            module=module,
            phase=phase,
            count=sum(c.count for c in group),
            payload_bytes=sum(c.count * c.payload_bytes for c in group),
            sent_bytes=math.ceil(sum(c.sent_bytes for c in group)),
        )
        for (axes, kind, module, phase), group in groups.items()
    ]


def _ratio(sent: float, minimum: float) -> float | None:
    return round(sent / minimum, 4) if minimum else None
