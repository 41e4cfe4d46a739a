"""Slots for values that outlive their tick: as few as the tick table allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.pipeline.schedule.operations import Kind, Op
from meshwright.pipeline.schedule.ticks import TickTable

ABSENT = -1
"""The entry of a column where a stage has no such operation in a tick."""

Grid = list[list[int]]
"""One number per tick and stage."""


@dataclass(frozen=True)
class Columns:
    """The parameters of one kind of operation, per tick and stage.

    Attributes:
        microbatch: the microbatch; ABSENT if there is nothing to do.
        chunk: the chunk.
        reads: for forward and backward, the slot of the input; ABSENT for the forward of the first
            virtual stage.
        saved: the slot of the values that forward saves for backward.
        cut: the slot of the values that an input gradient saves for the weight gradient.
    """

    microbatch: Grid
    chunk: Grid
    reads: Grid
    saved: Grid
    cut: Grid


@dataclass(frozen=True)
class Slots:
    """A tick table with a slot for every value that outlives its tick.

    Attributes:
        forward: the forward operations.
        backward: the backward or input-gradient operations.
        weight: the weight-gradient operations.
        activation_in: per tick and stage, the slot for the activation that arrives before it.
        gradient_in: per tick and stage, the slot for the gradient that arrives before it.
        gradient_own: per tick and stage, the slot for the gradient of the loss that the last
            virtual stage's forward gives.
        num_activations: slots for activations that arrived.
        num_gradients: slots for gradients that arrived.
        num_saved: slots for values that forward saves for backward.
        num_cuts: slots for values that input gradients save for weight gradients.
    """

    forward: Columns
    backward: Columns
    weight: Columns
    activation_in: Grid
    gradient_in: Grid
    gradient_own: Grid
    num_activations: int
    num_gradients: int
    num_saved: int
    num_cuts: int


def allocate_slots(table: TickTable) -> Slots:
    """Assign a slot to every value that outlives its tick, reusing slots once they are free."""
    return _Allocation(table).slots()


class _Allocation:
    """Computes the lifetime and the slot of each value."""

    def __init__(self, table: TickTable) -> None:
        self.table = table
        self.shape = table.shape
        self.at = {(stage, op): tick for tick, stage, op in table.placed()}

    def slots(self) -> Slots:
        activations, gradients, own, saved, cuts = self.lifetimes()
        packed = [
            _pack(lives, self.shape.num_stages)
            for lives in (activations, gradients | own, saved, cuts)
        ]
        (in_slot, num_in), (ct_slot, num_ct), (saved_slot, num_saved), (cut_slot, num_cuts) = packed
        reads = in_slot | ct_slot
        columns = [
            self.columns(kinds, reads, saved_slot, cut_slot)
            for kinds in (
                (Kind.FORWARD,),
                (Kind.BACKWARD, Kind.INPUT_GRAD),
                (Kind.WEIGHT_GRAD,),
            )
        ]
        return Slots(
            *columns,
            activation_in=self.arrivals(activations, in_slot),
            gradient_in=self.arrivals(gradients, ct_slot),
            gradient_own=self.arrivals(own, ct_slot),
            num_activations=num_in,
            num_gradients=num_ct,
            num_saved=num_saved,
            num_cuts=num_cuts,
        )

    def lifetimes(self) -> tuple[_Lives, _Lives, _Lives, _Lives, _Lives]:
        """Return (first, last) tick of every value, under the stage and operation that reads it."""
        activations, gradients, own, saved, cuts = _Lives(), _Lives(), _Lives(), _Lives(), _Lives()
        last_virtual = self.shape.num_virtual - 1
        for (stage, op), tick in self.at.items():
            at = self.shape.virtual(op, stage)
            if op.kind is Kind.FORWARD:
                if at > 0:
                    activations[stage, op] = (self.tick_of(op, at - 1, Kind.FORWARD) + 1, tick)
                release = max(
                    self.at[stage, other]
                    for other in self.same_piece(op, stage)
                    if other.kind is not Kind.FORWARD
                )
                saved[stage, op] = (tick, release)
            elif op.hands_back and at == last_virtual:
                own[stage, op] = (self.tick_of(op, at, Kind.FORWARD), tick)
            elif op.hands_back:
                gradients[stage, op] = (self.back_of(op, at + 1) + 1, tick)
            else:
                begin = Op(Kind.INPUT_GRAD, op.microbatch, op.chunk)
                cuts[stage, op] = (self.at[stage, begin], tick)
        return activations, gradients, own, saved, cuts

    def same_piece(self, op: Op, stage: int) -> list[Op]:
        """Return a stage's operations on the same microbatch and chunk."""
        every = (Op(kind, op.microbatch, op.chunk) for kind in Kind)
        return [other for other in every if (stage, other) in self.at]

    def tick_of(self, op: Op, virtual: int, kind: Kind) -> int:
        chunk, stage = divmod(virtual, self.shape.num_stages)
        return self.at[stage, Op(kind, op.microbatch, chunk)]

    def back_of(self, op: Op, virtual: int) -> int:
        chunk, stage = divmod(virtual, self.shape.num_stages)
        split = (stage, Op(Kind.INPUT_GRAD, op.microbatch, chunk)) in self.at
        return self.tick_of(op, virtual, Kind.INPUT_GRAD if split else Kind.BACKWARD)

    def grid(self) -> Grid:
        return [[ABSENT] * self.shape.num_stages for _ in self.table.ticks]

    def arrivals(self, lives: _Lives, slots: dict[tuple[int, Op], int]) -> Grid:
        grid = self.grid()
        for (stage, op), (first, _) in lives.items():
            grid[first][stage] = slots[stage, op]
        return grid

    def columns(
        self,
        kinds: Sequence[Kind],
        reads: dict[tuple[int, Op], int],
        saved: dict[tuple[int, Op], int],
        cut: dict[tuple[int, Op], int],
    ) -> Columns:
        columns = Columns(*(self.grid() for _ in range(5)))
        for (stage, op), tick in self.at.items():
            if op.kind not in kinds:
                continue
            forward = Op(Kind.FORWARD, op.microbatch, op.chunk)
            weight = Op(Kind.WEIGHT_GRAD, op.microbatch, op.chunk)
            columns.microbatch[tick][stage] = op.microbatch
            columns.chunk[tick][stage] = op.chunk
            columns.reads[tick][stage] = reads.get((stage, op), ABSENT)
            columns.saved[tick][stage] = saved[stage, forward]
            columns.cut[tick][stage] = cut.get((stage, weight), ABSENT)
        return columns


class _Lives(dict[tuple[int, Op], tuple[int, int]]):
    """From (stage, reading operation) to the first and last tick a value exists in."""


def _pack(
    lives: dict[tuple[int, Op], tuple[int, int]], num_stages: int
) -> tuple[dict[tuple[int, Op], int], int]:
    """Return a slot for each value such that no two that exist at the same time share one."""
    slots: dict[tuple[int, Op], int] = {}
    most = 0
    for stage in range(num_stages):
        free_from: list[int] = []
        of_stage = [(life, key) for key, life in lives.items() if key[0] == stage]
        for (first, last), key in sorted(of_stage, key=lambda pair: pair[0]):
            slot = next((n for n, tick in enumerate(free_from) if tick < first), len(free_from))
            free_from[slot : slot + 1] = [last]
            slots[key] = slot
        most = max(most, len(free_from))
    return slots, most
