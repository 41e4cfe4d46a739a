"""The ledger of a step: compile it, list its collectives, and compare with the minimum."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax

from meshwright.activity import activity
from meshwright.compiled.collectives import Collective, read_collectives, ring_bytes
from meshwright.compiled.hlo import CompiledProgram, compile_program
from meshwright.compiled.memory import memory_of
from meshwright.config.base import Frozen
from meshwright.ledger.minimum import Needed, needed_collectives
from meshwright.mesh.axes import describe_sizes
from meshwright.pipeline.execute.op_counts import count_operations
from meshwright.step.assemble import Assembled
from meshwright.units import human_bytes

LOWEST, HIGHEST = 0.98, 1.05
"""Ratios outside this range are suspicious: above it something is sent needlessly, below it
something that must be sent is missing."""


class Line(Frozen):
    """Collectives of one kind, axis and module.

    Attributes:
        axes: mesh axes they run over.
        kind: all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute.
        module: the module they belong to.
        phase: forward, backward or update.
        count: collectives per update.
        payload_bytes: bytes of the exchanged arrays, per update.
        sent_bytes: bytes each device sends, per update.
    """

    axes: list[str]
    kind: str
    module: str
    phase: str
    count: int
    payload_bytes: int
    sent_bytes: int


class AxisLedger(Frozen):
    """One mesh axis.

    Attributes:
        size: devices along the axis.
        sent_bytes: bytes each device sends over it per update; with pipeline stages, in the stage
            that sends most.
        minimum_bytes: bytes the plan needs to send; 0 if not known.
        ratio: sent over minimum bytes; null if nothing needs to be sent, or if not known.
        excess: bytes sent beyond the minimum, by module.
        known: whether the minimum is known. On a mesh with pipeline stages it is not.
    """

    size: int
    sent_bytes: int
    minimum_bytes: int
    ratio: float | None
    excess: list[str]
    known: bool = True

    @property
    def suspicious(self) -> bool:
        """Whether the axis deviates from its minimum."""
        if not self.known:
            return False
        if self.ratio is None:
            return self.sent_bytes > 0
        return not LOWEST <= self.ratio <= HIGHEST


class Ledger(Frozen):
    """The collectives of a compiled step.

    Attributes:
        mesh: axis sizes.
        known: whether the minimum is known; see `AxisLedger`.
        ratio: sent over minimum bytes, over all axes; null if not known.
        sent_bytes: bytes each device sends per update; with pipeline stages, in the stage that
            sends most.
        minimum_bytes: bytes the plan needs to send; 0 if not known.
        axes: the ledger of each axis.
        lines: all collectives, grouped; with pipeline stages, of a stage that has them.
        argument_bytes: memory of state and batch per device.
        temp_bytes: memory of temporaries per device.
        compile_seconds: compilation time.
    """

    mesh: dict[str, int]
    known: bool = True
    ratio: float | None
    sent_bytes: int
    minimum_bytes: int
    axes: dict[str, AxisLedger]
    lines: list[Line]
    argument_bytes: int
    temp_bytes: int
    compile_seconds: float

    def __str__(self) -> str:
        """Return what each device sends per update over each axis, and the minimum."""
        lines = [f"{describe_sizes(self.mesh)}: {human_bytes(self.sent_bytes)} sent per update"]
        for axis, own in self.axes.items():
            needed = (
                f"{human_bytes(own.minimum_bytes)} needed" if own.known else "minimum not known"
            )
            ratio = "" if own.ratio is None else f", ratio {own.ratio:.3f}"
            lines.append(f"  {axis}={own.size}: {human_bytes(own.sent_bytes)}, {needed}{ratio}")
            lines += [f"    {line}" for line in own.excess]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Ledger(mesh={self.mesh}, sent_bytes={self.sent_bytes}, "
            f"minimum_bytes={self.minimum_bytes}, ratio={self.ratio}, {len(self.lines)} lines)"
        )

    @property
    def suspicious(self) -> list[str]:
        """The axes that deviate from their minimum."""
        return [axis for axis, ledger in self.axes.items() if ledger.suspicious]


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
    stages = _by_stage(read_collectives(program.partitioned, mesh), assembled)
    needed = needed_collectives(assembled)
    memory = memory_of(program.compiled)
    axes = {
        axis: _axis(axis, size, mesh, stages, needed) for axis, size in mesh.items() if size > 1
    }
    known = mesh.get("pipe", 1) == 1
    sent = max(sum(c.sent_bytes for c in stage) for stage in stages)
    minimum = sum(n.sent_bytes for n in needed) if known else 0.0
    return Ledger(
        mesh=assembled.plan.mesh,
        known=known,
        ratio=_ratio(sent, minimum),
        sent_bytes=round(sent),
        minimum_bytes=round(minimum),
        axes=axes,
        lines=_lines(max(same, key=lambda c: c.count) for same in zip(*stages, strict=True)),
        argument_bytes=memory.argument,
        temp_bytes=memory.temp,
        compile_seconds=round(compile_seconds, 2),
    )


def _axis(
    axis: str,
    size: int,
    mesh: dict[str, int],
    stages: Sequence[Sequence[Collective]],
    needed: Sequence[Needed],
) -> AxisLedger:
    minimum_by_module: dict[tuple[str, str], float] = defaultdict(float)
    by_stage = [_sent_over(axis, mesh, stage) for stage in stages]
    sent = max(by_stage, key=lambda stage: sum(stage.values()))
    for need in needed:
        if need.axis == axis:
            minimum_by_module[_part(need.module), _family(need.kind)] += need.sent_bytes
    total, minimum = sum(sent.values()), sum(minimum_by_module.values())
    if mesh.get("pipe", 1) > 1:
        return AxisLedger(
            size=size, sent_bytes=round(total), minimum_bytes=0, ratio=None, excess=[], known=False
        )
    return AxisLedger(
        size=size,
        sent_bytes=round(total),
        minimum_bytes=round(minimum),
        ratio=_ratio(total, minimum),
        excess=_excess(sent, minimum_by_module, minimum),
    )


def _by_stage(collectives: list[Collective], assembled: Assembled) -> list[list[Collective]]:
    """Return the collectives of each pipeline stage; one list if there are no stages."""
    pipeline, plan = assembled.step.pipeline, assembled.plan
    if pipeline is None:
        return [collectives]
    rounds = plan.batch.gradient_accumulation_steps // plan.num_microbatches
    counts = count_operations(pipeline.schedule, plan.num_microbatches, plan.size("pipe"), rounds)
    return [
        [replace(c, count=counts.times(c.op_name, c.count, stage)) for c in collectives]
        for stage in range(counts.num_stages)
    ]


def _sent_over(
    axis: str, mesh: dict[str, int], collectives: Iterable[Collective]
) -> dict[tuple[str, str], float]:
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for collective in collectives:
        share = shares(collective, mesh).get(axis, 0.0)
        sent[_part(collective.module), _family(collective.kind)] += share
    return sent


def shares(collective: Collective, mesh: dict[str, int]) -> dict[str, float]:
    """Return the bytes that a collective over several axes sends over each of them.

    A reduction over data × fsdp is a reduce-scatter over fsdp, an all-reduce of the pieces over
    data, and an all-gather over fsdp.
    """
    if len(collective.axes) == 1 or any(axis not in mesh for axis in collective.axes):
        return {collective.axes[0]: collective.sent_bytes}
    by_axis: dict[str, float] = {}
    payload = collective.payload_bytes * collective.count
    for axis in sorted(collective.axes, key=list(mesh).index, reverse=True):
        by_axis[axis] = ring_bytes(collective.kind, payload, mesh[axis])
        payload /= mesh[axis]
    return by_axis


def _part(module: str) -> str:
    """Return the part of the model a layer belongs to: query, key and value share a reduction."""
    return module.rpartition(".")[0] or module


def _family(kind: str) -> str:
    return "reduce" if kind in ("all-reduce", "reduce-scatter") else kind


def _excess(
    sent: dict[tuple[str, str], float],
    minimum_by_module: dict[tuple[str, str], float],
    minimum: float,
) -> list[str]:
    """Describe the bytes that modules send beyond the minimum, largest first."""
    over = {key: value - minimum_by_module.get(key, 0.0) for key, value in sent.items()}
    large = {key: value for key, value in over.items() if value > max(minimum, 1.0) * 1e-3}
    ordered = sorted(large.items(), key=lambda item: -item[1])
    return [
        f"{module or 'outside modules'}: {kind} of {value:,.0f} bytes beyond the minimum"
        for (module, kind), value in ordered
    ]


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
