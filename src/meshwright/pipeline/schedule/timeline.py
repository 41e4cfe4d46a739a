"""Timelines: when each stage works and when it waits, simulated from its operations."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from fractions import Fraction

from meshwright.errors import UserError
from meshwright.pipeline.schedule.operations import Event, Kind, Op, Operations, Shape, Times
from meshwright.pipeline.schedule.spans import Span, Spans
from meshwright.pipeline.schedule.timeline_drawing import render_timeline


class Timeline(Spans):
    """When each operation runs; printed as a chart, one row per stage, time from left to right."""

    def __repr__(self) -> str:
        return f"Timeline({self.shape}, waits {float(self.bubble) * 100:.1f}%)"

    def __str__(self) -> str:
        lines = render_timeline(self).lines(shutil.get_terminal_size().columns)
        return "\n".join(line.plain for line in lines)


def simulate(lists: Operations, shape: Shape, times: Times | None = None) -> Timeline:
    """Run every stage through its list, each operation as soon as its inputs exist."""
    times = times or Times()
    done: dict[Event, Fraction] = {}
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
                event = shape.gives(op, stage)
                if event:
                    done[event] = free[stage]
                position[stage] += 1
                moved = True
            else:
                waiting.discard(stage)
        if not moved and waiting:
            raise _deadlock(lists, position, sorted(waiting))
    return Timeline(shape, tuple(spans), max(free))


def check_operations(lists: Operations, shape: Shape) -> None:
    """Refuse lists with missing or repeated operations, and those that deadlock."""
    if len(lists) != shape.num_stages:
        raise UserError(f"there are {len(lists)} lists for {shape.num_stages} stages")
    for stage, ops in enumerate(lists):
        _check_complete(ops, shape, stage)
    simulate(lists, shape)


def in_flight(lists: Operations) -> list[int]:
    """Return, for each stage, the largest number of activations of one chunk in memory."""
    return [_most_in_flight(ops) for ops in lists]


def _most_in_flight(ops: Sequence[Op]) -> int:
    held = most = 0
    for op in ops:
        held += op.kind is Kind.FORWARD
        most = max(most, held)
        held -= op.releases
    return most


def _check_complete(ops: Sequence[Op], shape: Shape, stage: int) -> None:
    seen: dict[tuple[int, int], list[Kind]] = {}
    for op in ops:
        seen.setdefault((op.microbatch, op.chunk), []).append(op.kind)
    wanted = {(m, c) for m in range(shape.num_microbatches) for c in range(shape.num_chunks)}
    complete = ([Kind.FORWARD, Kind.BACKWARD], [Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD])
    for place in sorted(wanted | seen.keys()):
        kinds = seen.get(place, [])
        if place not in wanted or kinds not in complete:
            text = " ".join(kind.value for kind in kinds) or "nothing"
            raise UserError(
                f"stage {stage} does {text} for microbatch {place[0]}, chunk {place[1]}",
                why="each microbatch of each chunk needs F then B, or F then I then W, once",
            )


def _deadlock(lists: Operations, position: Sequence[int], waiting: Sequence[int]) -> UserError:
    positions = ", ".join(f"stage {stage} at {lists[stage][position[stage]]}" for stage in waiting)
    return UserError("the stages of this schedule wait for each other forever", why=positions)
