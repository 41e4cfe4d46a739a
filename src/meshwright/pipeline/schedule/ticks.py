"""The tick table: the operations of a program that all stages execute together, tick by tick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from meshwright.pipeline.schedule.operations import Event, Op, Operations, Shape, Times
from meshwright.pipeline.schedule.spans import Span
from meshwright.pipeline.schedule.timeline import Timeline

Tick = tuple[tuple[Op, ...], ...]
"""The operations of each stage in one tick, in order."""


@dataclass(frozen=True, repr=False)
class TickTable:
    """The operations of all stages; a tick lasts as long as its slowest stage.

    Messages sent in a tick arrive before the next one.

    Attributes:
        shape: the pipeline's size.
        ticks: the ticks in order.
    """

    shape: Shape
    ticks: tuple[Tick, ...]

    def __repr__(self) -> str:
        return f"TickTable({self.shape}, {len(self.ticks)} ticks)"

    def __str__(self) -> str:
        """Return a table with one line per tick and one column per stage."""
        names = ["tick", *(f"stage {n}" for n in range(self.shape.num_stages))]
        lines = [names] + [
            [str(number), *(" ".join(map(str, ops)) for ops in tick)]
            for number, tick in enumerate(self.ticks)
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = (zip(line, widths, strict=True) for line in lines)
        return "\n".join("  ".join(f"{c:<{w}}" for c, w in row).rstrip() for row in rows)

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
    done: set[Event] = set()
    position = [0] * shape.num_stages
    ticks: list[Tick] = []
    while any(at < len(ops) for at, ops in zip(position, lists, strict=True)):
        row: list[tuple[Op, ...]] = []
        new: list[Event] = []
        for stage, ops in enumerate(lists):
            op = ops[position[stage]] if position[stage] < len(ops) else None
            if op is None or not done.issuperset(shape.needs(op, stage)):
                row.append(())
                continue
            row.append((op,))
            position[stage] += 1
            event = shape.gives(op, stage)
            new += [event] if event else []
        assert any(row), "stages wait for each other"
        done.update(new)
        ticks.append(tuple(row))
    return TickTable(shape, tuple(ticks))
