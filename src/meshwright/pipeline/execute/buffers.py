"""Slots for values that outlive their tick: as few as the tick table allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.pipeline.schedule.operations import Kind
from meshwright.pipeline.schedule.ticks import TickTable

ABSENT = -1
"""The entry of a column where a stage has no such operation in a tick."""

Grid = NDArray[np.int64]
"""One number per tick and stage."""

_PerPass = NDArray[np.int64]
"""One number per microbatch and virtual stage."""


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


@dataclass(frozen=True)
class SlotNumbers:
    """How many slots of each kind a tick table needs.

    Attributes:
        num_activations: slots for activations that arrived.
        num_gradients: slots for gradients that arrived.
        num_saved: slots for values that forward saves for backward.
        num_cuts: slots for values that input gradients save for weight gradients.
    """

    num_activations: int
    num_gradients: int
    num_saved: int
    num_cuts: int


@dataclass(frozen=True)
class SlotsNeeded(SlotNumbers):
    """How many slots a tick table needs, and how often something arrives.

    Attributes:
        activation_ticks: ticks before which an activation arrives at any stage.
        gradient_ticks: ticks before which a gradient arrives at any stage.
    """

    activation_ticks: int
    gradient_ticks: int


def allocate_slots(table: TickTable) -> Slots:
    """Assign a slot to every value that outlives its tick, reusing slots once they are free."""
    return _Allocation(table).slots()


def count_slots(table: TickTable) -> SlotsNeeded:
    """Return how many slots `allocate_slots` would assign, without assigning them."""
    return _Allocation(table).needed()


class _Lives(NamedTuple):
    """The first and the last tick in which the value that each pass reads exists; or ABSENT."""

    first: _PerPass
    last: _PerPass

    @property
    def exist(self) -> NDArray[np.bool_]:
        return self.first != ABSENT


class _Allocation:
    """Computes the lifetime and the slot of each value."""

    def __init__(self, table: TickTable) -> None:
        self.shape, self.num_ticks = table.shape, len(table.ticks)
        self.at = _ticks_of_passes(table)
        backward, inputs = self.at[Kind.BACKWARD], self.at[Kind.INPUT_GRAD]
        self.back = np.maximum(backward, inputs)
        self.stage = np.arange(self.shape.num_virtual) % self.shape.num_stages

    def slots(self) -> Slots:
        activations, gradients, own = self.activations(), self.gradients(), self.own_gradients()
        in_slot, num_in = self.pack(activations)
        ct_slot, num_ct = self.pack(_either(gradients, own))
        saved_slot, num_saved = self.pack(self.saved())
        cut_slot, num_cuts = self.pack(self.cuts())
        none = np.full_like(self.back, ABSENT)
        return Slots(
            forward=self.columns(self.at[Kind.FORWARD], in_slot, saved_slot, cut_slot),
            backward=self.columns(self.back, ct_slot, saved_slot, cut_slot),
            weight=self.columns(self.at[Kind.WEIGHT_GRAD], none, saved_slot, cut_slot),
            activation_in=self.grid(activations.first, in_slot),
            gradient_in=self.grid(gradients.first, ct_slot),
            gradient_own=self.grid(own.first, ct_slot),
            num_activations=num_in,
            num_gradients=num_ct,
            num_saved=num_saved,
            num_cuts=num_cuts,
        )

    def needed(self) -> SlotsNeeded:
        activations, gradients = self.activations(), self.gradients()
        return SlotsNeeded(
            num_activations=self.most(activations),
            num_gradients=self.most(_either(gradients, self.own_gradients())),
            num_saved=self.most(self.saved()),
            num_cuts=self.most(self.cuts()),
            activation_ticks=len(np.unique(activations.first[activations.exist])),
            gradient_ticks=len(np.unique(gradients.first[gradients.exist])),
        )

    def activations(self) -> _Lives:
        """Return the lives of what the virtual stage before sends; the first has none before it."""
        forward = self.at[Kind.FORWARD]
        lives = self.no_lives()
        lives.first[:, 1:], lives.last[:, 1:] = forward[:, :-1] + 1, forward[:, 1:]
        return lives

    def gradients(self) -> _Lives:
        """Return the lives of what the virtual stage after sends back; the last has none after."""
        lives = self.no_lives()
        lives.first[:, :-1], lives.last[:, :-1] = self.back[:, 1:] + 1, self.back[:, :-1]
        return lives

    def own_gradients(self) -> _Lives:
        """Return the lives of the gradients of the loss, which the last virtual stage computes."""
        lives = self.no_lives()
        lives.first[:, -1], lives.last[:, -1] = self.at[Kind.FORWARD][:, -1], self.back[:, -1]
        return lives

    def saved(self) -> _Lives:
        """Return the lives of what forward saves, until no gradient needs it."""
        return _Lives(self.at[Kind.FORWARD], np.maximum(self.back, self.at[Kind.WEIGHT_GRAD]))

    def cuts(self) -> _Lives:
        """Return the lives of what input gradients save for weight gradients."""
        return _Lives(self.at[Kind.INPUT_GRAD], self.at[Kind.WEIGHT_GRAD])

    def no_lives(self) -> _Lives:
        return _Lives(np.full_like(self.back, ABSENT), np.full_like(self.back, ABSENT))

    def most(self, lives: _Lives) -> int:
        """Return how many values a stage has at a time at most, which is how many slots it needs.

        A slot is free from the tick after the last one of its value.
        """
        changes = np.zeros((self.shape.num_stages, self.num_ticks + 1), int)
        _, virtual = np.nonzero(lives.exist)
        np.add.at(changes, (self.stage[virtual], lives.first[lives.exist]), 1)
        np.add.at(changes, (self.stage[virtual], lives.last[lives.exist] + 1), -1)
        return int(changes.cumsum(axis=1).max())

    def pack(self, lives: _Lives) -> tuple[_PerPass, int]:
        """Return a slot for each value such that no two that exist at the same time share one."""
        slots = np.full_like(lives.first, ABSENT)
        most = 0
        for stage in range(self.shape.num_stages):
            free_from: list[int] = []
            own = np.nonzero(lives.exist & (self.stage == stage))
            lists = (each.tolist() for each in (lives.first[own], lives.last[own], *own))
            of_stage = sorted(zip(*lists, strict=True))
            for first, last, microbatch, virtual in of_stage:
                slot = next((n for n, tick in enumerate(free_from) if tick < first), len(free_from))
                free_from[slot : slot + 1] = [last]
                slots[microbatch, virtual] = slot
            most = max(most, len(free_from))
        return slots, most

    def grid(self, ticks: _PerPass, values: _PerPass) -> Grid:
        """Return values by the tick in which they are used, and by stage."""
        grid = np.full((self.num_ticks, self.shape.num_stages), ABSENT)
        used = ticks != ABSENT
        grid[ticks[used], np.broadcast_to(self.stage, ticks.shape)[used]] = values[used]
        return grid

    def columns(self, ticks: _PerPass, *slots: _PerPass) -> Columns:
        microbatch = np.broadcast_to(np.arange(len(ticks))[:, None], ticks.shape)
        chunk = np.arange(self.shape.num_virtual) // self.shape.num_stages
        values = (microbatch, np.broadcast_to(chunk, ticks.shape), *slots)
        return Columns(*(self.grid(ticks, each) for each in values))


def _ticks_of_passes(table: TickTable) -> dict[Kind, _PerPass]:
    """Return for each kind the tick in which each pass runs, or ABSENT."""
    shape = table.shape
    lists: Any = {
        kind: [[ABSENT] * shape.num_virtual for _ in range(shape.num_microbatches)] for kind in Kind
    }
    for tick, stage, op in table.placed():
        lists[op.kind][op.microbatch][shape.virtual(op, stage)] = tick
    return {kind: np.array(each) for kind, each in lists.items()}


def _either(one: _Lives, other: _Lives) -> _Lives:
    """Return the lives of values of which each pass has one or the other."""
    return _Lives(*(np.maximum(*pair) for pair in zip(one, other, strict=True)))
