"""What collectives send over each axis, and how much of it while the device computes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.compiled.asynchronous import Scheduled, is_scheduled, scheduled_collectives
from meshwright.compiled.collectives import Collective, ring_bytes
from meshwright.compiled.compile_program import CompiledProgram
from meshwright.ledgers.ledger_records import KindOverlap, NotOverlapped
from meshwright.program.jaxpr.names import common_module

SHOWN = 5
"""Collectives that nothing is computed during: the largest are listed."""
_NEGLIGIBLE = 1e-3

_ON_CPU = "programs for CPUs have no asynchronous collectives; those for GPUs show it"
_NO_TEXT = "this backend does not show the program it runs"
_NO_ORDER = "this compiler does not show the order in which the program runs"
_NOT_FOLLOWED = "the program does not show where each collective ends"

Times = Callable[[Collective, int], int]
"""How often a pipeline stage runs a collective."""


@dataclass(frozen=True)
class Overlaps:
    """The collectives of the program that runs, or why it is not known what overlaps."""

    scheduled: Sequence[Scheduled]
    times: Times
    unknown: str = ""

    def of_axis(self, axis: str, mesh: dict[str, int], stage: int) -> dict[str, KindOverlap]:
        """Return what a stage sends over an axis by family of collectives; none if unknown."""
        sent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for each in self._of_stage(stage):
            share = shares(each.collective, mesh).get(axis, 0.0)
            total = sent[family(each.collective.kind)]
            total[0] += share
            total[1] += share if each.overlapped else 0.0
        return {
            kind: KindOverlap(
                sent_bytes=round(total),
                overlapped_bytes=round(during),
                overlapped=round(during / total, 4),
            )
            for kind, (total, during) in sent.items()
            if round(total)
        }

    def exposed(self, stage: int) -> list[NotOverlapped]:
        """Return the largest collectives of a stage that nothing is computed during."""
        scheduled = self._of_stage(stage)
        launches: dict[str, list[Scheduled]] = defaultdict(list)
        for each in scheduled:
            if not each.overlapped:
                launches[each.collective.name].append(each)
        found = [_not_overlapped(values) for values in launches.values()]
        least = _NEGLIGIBLE * sum(each.collective.sent_bytes for each in scheduled)
        found = [launch for launch in found if launch.sent_bytes > least]
        return sorted(found, key=lambda launch: -launch.sent_bytes)[:SHOWN]

    def _of_stage(self, stage: int) -> list[Scheduled]:
        return [
            replace(s, collective=replace(s.collective, count=self.times(s.collective, stage)))
            for s in self.scheduled
        ]


def read_overlaps(
    program: CompiledProgram, mesh: dict[str, int], platform: str, times: Times
) -> Overlaps:
    """Read from a compiled program which collectives overlap with products."""
    if all(size == 1 for size in mesh.values()):
        return Overlaps([], times)
    if platform == "cpu":
        return Overlaps([], times, _ON_CPU)
    text = program.optimized_or_none()
    if text is None or not is_scheduled(text):
        return Overlaps([], times, _NO_TEXT if text is None else _NO_ORDER)
    scheduled = scheduled_collectives(text, mesh)
    if any(each.overlapped is None for each in scheduled):
        return Overlaps([], times, _NOT_FOLLOWED)
    return Overlaps(scheduled, times)


def _not_overlapped(values: Sequence[Scheduled]) -> NotOverlapped:
    """Describe the values that one collective sends."""
    first = values[0].collective
    return NotOverlapped(
        axes=list(first.axes),
        kind=first.kind,
        modules=_outer_modules(module for value in values for module in value.modules),
        phase=first.phase,
        count=first.count,
        sent_bytes=round(sum(value.collective.sent_bytes for value in values)),
    )


def _outer_modules(modules: Iterable[str]) -> list[str]:
    """Return the blocks that modules are in, or what they have in common within one block."""
    inner = list(dict.fromkeys(modules))
    outer = list(dict.fromkeys(map(_block, inner)))
    return [common_module(inner)] if len(outer) == 1 else outer


def _block(module: str) -> str:
    """Return a path up to its first number: ``blocks.0`` of ``blocks.0.mlp.up``."""
    parts = module.split(".")
    numbered = [n for n, part in enumerate(parts) if part == "*" or part.isdecimal()]
    return ".".join(parts[: numbered[0] + 1 if numbered else 1])


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


def family(kind: str) -> str:
    """Return ``reduce`` for all-reduces and reduce-scatters, and other kinds as they are."""
    return "reduce" if kind in ("all-reduce", "reduce-scatter") else kind
