"""When each stage works and when it waits: stages on their own, or in lockstep, tick by tick."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from meshwright.errors import UserError
from meshwright.pipeline.schedule.operations import (
    Kind,
    Op,
    Operations,
    OpResult,
    Shape,
    Span,
    Times,
)
from meshwright.pipeline.schedule.timeline_drawing import Timeline
from meshwright.text.columns import Columns, as_text


def simulate(lists: Operations, shape: Shape, times: Times | None = None) -> Timeline:
    """Run every stage through its list, each operation as soon as its inputs exist."""
    times = times or Times()
    done: dict[OpResult, Fraction] = {}
    free = [Fraction(0)] * shape.num_stages
    position = [0] * shape.num_stages
    spans: list[Span] = []
    waiting = set(range(shape.num_stages))
    while waiting:
        moved = False
        for stage in sorted(waiting):
            while position[stage] < len(lists[stage]):
                op = lists[stage][position[stage]]
                needs = shape.needs(op, stage)
                if not all(need in done for need in needs):
                    break
                start = max([free[stage], *(done[need] for need in needs)])
                free[stage] = start + times.of(op, stage, shape.num_chunks)
                spans.append(Span(stage, op, start, free[stage]))
                result = shape.gives(op, stage)
                if result:
                    done[result] = free[stage]
                position[stage] += 1
                moved = True
            else:
                waiting.discard(stage)
        if not moved and waiting:
            at = (f"stage {stage} at {lists[stage][position[stage]]}" for stage in sorted(waiting))
            what = "the stages of this schedule wait for each other forever"
            raise UserError(what, why=", ".join(at))
    return Timeline(shape, tuple(spans), max(free))


def in_flight(lists: Operations) -> list[int]:
    """Return, for each stage, the largest number of activations of one chunk in memory."""
    most = [0] * len(lists)
    for stage, ops in enumerate(lists):
        held = 0
        for op in ops:
            held += op.kind is Kind.FORWARD
            most[stage] = max(most[stage], held)
            held -= op.releases
    return most


Tick = tuple[tuple[Op, ...], ...]
"""The operations of each stage in one tick, in order."""


@dataclass(frozen=True, repr=False)
class TickTable:
    """The operations of all stages; a tick lasts as long as its slowest stage.

    Messages sent in a tick arrive before the next one.
    """

    shape: Shape
    ticks: tuple[Tick, ...]

    def __repr__(self) -> str:
        return f"TickTable({self.shape}, {len(self.ticks)} ticks)"

    def __str__(self) -> str:
        """Return a table with one line per tick and one column per stage."""
        rows = [
            [str(number), *(" ".join(map(str, ops)) for ops in tick)]
            for number, tick in enumerate(self.ticks)
        ]
        head = ["tick", *(f"stage {n}" for n in range(self.shape.num_stages))]
        return as_text(Columns(head, rows))

    def placed(self) -> Iterator[tuple[int, int, Op]]:
        """Yield (tick, stage, operation) in the order of execution."""
        for number, tick in enumerate(self.ticks):
            for stage, ops in enumerate(tick):
                for op in ops:
                    yield number, stage, op

    def operations(self) -> list[list[Op]]:
        """Return the operations of each stage, in order."""
        stages = range(self.shape.num_stages)
        return [[op for tick in self.ticks for op in tick[stage]] for stage in stages]

    def timeline(self, times: Times | None = None) -> Timeline:
        """Return when each operation runs if operations take this long."""
        times = times or Times()
        spans: list[Span] = []
        start = Fraction(0)
        for tick in self.ticks:
            ends = [start]
            for stage, ops in enumerate(tick):
                now = start
                for op in ops:
                    end = now + times.of(op, stage, self.shape.num_chunks)
                    spans.append(Span(stage, op, now, end))
                    now = end
                ends.append(now)
            start = max(ends)
        return Timeline(self.shape, tuple(spans), start)


def in_lockstep(lists: Operations, shape: Shape) -> TickTable:
    """Place operations one per stage and tick, each as early as its inputs allow."""
    done: set[OpResult] = set()
    position = [0] * shape.num_stages
    ticks: list[Tick] = []
    while any(at < len(ops) for at, ops in zip(position, lists, strict=True)):
        row: list[tuple[Op, ...]] = []
        new: list[OpResult] = []
        for stage, ops in enumerate(lists):
            op = ops[position[stage]] if position[stage] < len(ops) else None
            if op is None or not done.issuperset(shape.needs(op, stage)):
                row.append(())
                continue
            row.append((op,))
            position[stage] += 1
            result = shape.gives(op, stage)
            new += [result] if result else []
        assert any(row), "stages wait for each other"
        done.update(new)
        ticks.append(tuple(row))
    return TickTable(shape, tuple(ticks))
