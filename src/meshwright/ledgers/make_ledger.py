"""The ledger of a step: compile it, list its collectives, and compare with the minimum."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax

from meshwright.compiled.collectives import Collective, read_collectives
from meshwright.compiled.compile_program import CompiledProgram, compile_program
from meshwright.data.batches import read_batch
from meshwright.errors import UserError
from meshwright.ledgers.excess_reasons import Reason, Reasons, explain
from meshwright.ledgers.ledger_records import AxisLedger, Explanation, Ledger, Line, ModuleLedger
from meshwright.ledgers.minimum import Needed, needed_by_stage
from meshwright.ledgers.overlap import Overlaps, family, read_overlaps, shares
from meshwright.pipeline.execute.tick_rows import OpCounts, count_operations
from meshwright.program.weight_reads import weight_reads
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled
from meshwright.text.units import a_type
from meshwright.trees import placed_struct

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
            f"mw.ledger needs a trainer, not {a_type(trainer)}",
            why="it compiles the step that a trainer builds",
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


def lower_step(assembled: Assembled, batch: Any, key: str | None = None) -> Any:
    """Lower the step for batches of this shape, ready to be compiled; see `TrainStep.lower`."""
    sharding = assembled.step.shardings.batch
    leaves = [placed_struct(leaf, sharding) for leaf in jax.tree.leaves(batch)]
    return assembled.step.lower(leaves, key)


def read_ledger(
    assembled: Assembled, program: CompiledProgram, *, compile_seconds: float
) -> Ledger:
    """List what a compiled step sends."""
    mesh = dict(assembled.mesh.shape)
    counts = _operation_counts(assembled)
    # One device sends nothing, and the text of a large program takes a second to read.
    alone = all(size == 1 for size in mesh.values())
    found = [] if alone else read_collectives(program.partitioned, mesh)
    # What each pipeline stage sends; one list without stages.
    stages = [
        [replace(c, count=_times(c, counts, stage)) for c in found]
        for stage in range(counts.num_stages if counts else 1)
    ]
    needed = needed_by_stage(assembled, counts)
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


@dataclass
class _Traffic:
    """What a module sends over an axis by one family of collectives, and what the plan needs."""

    sent: list[tuple[Reason | None, float]] = field(default_factory=list)
    least: float = 0.0

    @property
    def total(self) -> float:
        return sum(nbytes for _, nbytes in self.sent)

    @property
    def excess(self) -> float:
        return self.total - self.least


_ByModule = dict[tuple[str, str], _Traffic]
"""What is sent by module and family of collectives."""


def _axis(
    axis: str,
    mesh: dict[str, int],
    stages: Sequence[_Explained],
    needed: Sequence[Sequence[Needed]],
    overlaps: Overlaps,
) -> AxisLedger:
    by_stage = [_traffic_over(axis, mesh, *stage) for stage in zip(stages, needed, strict=True)]
    totals = [sum(each.total for each in stage.values()) for stage in by_stage]
    total = max(totals)
    largest = totals.index(total)
    traffic = by_stage[largest]
    minimum = sum(each.least for each in traffic.values())
    # The bytes of a module that are not worth a line.
    negligible = max(minimum, 1.0) * 1e-3
    overlap = overlaps.of_axis(axis, mesh, largest)
    during = sum(kind.overlapped_bytes for kind in overlap.values())
    return AxisLedger(
        size=mesh[axis],
        sent_bytes=round(total),
        minimum_bytes=round(minimum),
        ratio=_ratio(total, minimum),
        excess=_excess(traffic, negligible),
        modules=_modules(traffic, negligible),
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


def _traffic_over(
    axis: str, mesh: dict[str, int], collectives: _Explained, needed: Iterable[Needed]
) -> _ByModule:
    """Return what a stage sends over an axis, and what it needs to send."""
    traffic: _ByModule = defaultdict(_Traffic)
    for collective, reason in collectives:
        share = shares(collective, mesh).get(axis, 0.0)
        traffic[_part(collective.module), family(collective.kind)].sent.append((reason, share))
    for need in needed:
        if need.axis == axis:
            traffic[_part(need.module), family(need.kind)].least += need.sent_bytes
    return traffic


def _part(module: str) -> str:
    """Return the part of the model a layer belongs to: query, key and value share a reduction."""
    return module.rpartition(".")[0] or module


def _excess(traffic: _ByModule, negligible: float) -> list[str]:
    """Describe the bytes that modules send beyond the minimum, largest first."""
    large = [(key, each.excess) for key, each in traffic.items() if each.excess > negligible]
    return [
        f"{module or 'outside modules'}: {kind} of {excess:,.0f} bytes beyond the minimum"
        for (module, kind), excess in sorted(large, key=lambda item: -item[1])
    ]


def _modules(traffic: _ByModule, negligible: float) -> dict[str, ModuleLedger]:
    """Return what each module sends, largest first."""
    by_module: dict[str, dict[str, _Traffic]] = defaultdict(dict)
    for (module, kind), each in traffic.items():
        by_module[module][kind] = each
    found = {module: _module(kinds, negligible) for module, kinds in by_module.items()}
    ordered = sorted(found.items(), key=lambda item: -item[1].sent_bytes)
    return {name: own for name, own in ordered if own.sent_bytes or own.minimum_bytes}


def _module(kinds: dict[str, _Traffic], negligible: float) -> ModuleLedger:
    return ModuleLedger(
        sent_bytes=round(sum(each.total for each in kinds.values())),
        minimum_bytes=round(sum(each.least for each in kinds.values())),
        kinds={kind: round(each.excess) for kind, each in kinds.items() if round(each.excess)},
        explained=[
            Explanation(sent_bytes=round(size), reason=reason)
            for each in kinds.values()
            for reason, size in explain(each.sent, each.least, negligible).items()
        ],
    )


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
