"""The tick table as arrays: a row per tick, slots for what outlives it, counts of operations."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from meshwright.pipeline.schedule.operations import Kind
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.pipeline.schedule.timeline import TickTable

ABSENT = -1
"""The number in a column where a stage has nothing to do in a tick."""

_Grid = NDArray[np.int32]
"""One number per tick and stage."""

_PerPass = NDArray[np.int64]
"""One number per microbatch and virtual stage."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OpRow:
    """One kind of operation in a tick of a stage; whole columns are [ticks, stages].

    ``reads`` is the slot of the input, ABSENT for the forward of the first virtual stage; ``saved``
    that of what forward saves for backward; ``cut`` that of what an input gradient saves for the
    weight gradient. The microbatch is ABSENT if there is nothing to do.
    """

    microbatch: Array
    chunk: Array
    reads: Array
    saved: Array
    cut: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TickRow:
    """What one tick of one stage does; numbers are ABSENT where there is nothing to do.

    ``activation_in`` and ``gradient_in`` are the slots for what arrives before the tick,
    ``gradient_own`` that for the gradient of the loss, after the forward of the last virtual stage.
    ``sends`` and ``sends_back`` say whether any stage sends.
    """

    forward: OpRow
    backward: OpRow
    weight: OpRow
    activation_in: Array
    gradient_in: Array
    gradient_own: Array
    stage: Array
    sends: Array
    sends_back: Array


@dataclass(frozen=True)
class SlotCounts:
    """How many slots of each kind a tick table needs, and ticks before which something arrives."""

    num_activations: int
    num_gradients: int
    num_saved: int
    num_cuts: int
    activation_ticks: int
    gradient_ticks: int

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are operations of their own."""
        return self.num_cuts > 0


def allocate_slots(table: TickTable) -> TickRow:
    """Return the table as arrays [ticks, stages], with a slot for every value that is kept."""
    return _Allocation(table).rows()


def count_slots(table: TickTable) -> SlotCounts:
    """Return how many slots `allocate_slots` uses, without assigning them."""
    return _Allocation(table).counts()


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

    def rows(self) -> TickRow:
        activations, gradients, own = self.activations(), self.gradients(), self.own_gradients()
        in_slot, gradient_slot = self.pack(activations), self.pack(_either(gradients, own))
        saved_slot, cut_slot = self.pack(self.saved()), self.pack(self.cuts())
        none = np.full_like(self.back, ABSENT)
        activation_in = self.grid(activations.first, in_slot)
        gradient_in = self.grid(gradients.first, gradient_slot)
        stages = np.arange(self.shape.num_stages, dtype=np.int32)
        # Typed as Any: the record holds NumPy arrays, which the executor sees traced.
        make: Any = TickRow
        return make(
            forward=self.op(self.at[Kind.FORWARD], in_slot, saved_slot, cut_slot),
            backward=self.op(self.back, gradient_slot, saved_slot, cut_slot),
            weight=self.op(self.at[Kind.WEIGHT_GRAD], none, saved_slot, cut_slot),
            activation_in=activation_in,
            gradient_in=gradient_in,
            gradient_own=self.grid(own.first, gradient_slot),
            stage=np.broadcast_to(stages, activation_in.shape),
            sends=_sent(activation_in),
            sends_back=_sent(gradient_in),
        )

    def counts(self) -> SlotCounts:
        activations, gradients = self.activations(), self.gradients()
        return SlotCounts(
            num_activations=self.most(activations),
            num_gradients=self.most(_either(gradients, self.own_gradients())),
            num_saved=self.most(self.saved()),
            num_cuts=self.most(self.cuts()),
            activation_ticks=len(np.unique(activations.first[activations.exist])),
            gradient_ticks=len(np.unique(gradients.first[gradients.exist])),
        )

    def activations(self) -> _Lives:
        """Return the lives of activations sent by the previous virtual stage."""
        forward = self.at[Kind.FORWARD]
        lives = self.no_lives()
        lives.first[:, 1:], lives.last[:, 1:] = forward[:, :-1] + 1, forward[:, 1:]
        return lives

    def gradients(self) -> _Lives:
        """Return the lives of gradients sent back by the next virtual stage."""
        lives = self.no_lives()
        lives.first[:, :-1], lives.last[:, :-1] = self.back[:, 1:] + 1, self.back[:, :-1]
        return lives

    def own_gradients(self) -> _Lives:
        """Return the lives of the gradients of the loss, which the last virtual stage computes."""
        lives = self.no_lives()
        lives.first[:, -1], lives.last[:, -1] = self.at[Kind.FORWARD][:, -1], self.back[:, -1]
        return lives

    def saved(self) -> _Lives:
        """Return the lives of values that forward saves, until the last gradient reads them."""
        return _Lives(self.at[Kind.FORWARD], np.maximum(self.back, self.at[Kind.WEIGHT_GRAD]))

    def cuts(self) -> _Lives:
        """Return the lives of values that input gradients save for weight gradients."""
        return _Lives(self.at[Kind.INPUT_GRAD], self.at[Kind.WEIGHT_GRAD])

    def no_lives(self) -> _Lives:
        return _Lives(np.full_like(self.back, ABSENT), np.full_like(self.back, ABSENT))

    def most(self, lives: _Lives) -> int:
        """Return how many slots a stage needs; one is free from the tick after its value's last."""
        changes = np.zeros((self.shape.num_stages, self.num_ticks + 1), int)
        _, virtual = np.nonzero(lives.exist)
        np.add.at(changes, (self.stage[virtual], lives.first[lives.exist]), 1)
        np.add.at(changes, (self.stage[virtual], lives.last[lives.exist] + 1), -1)
        return int(changes.cumsum(axis=1).max())

    def pack(self, lives: _Lives) -> _PerPass:
        """Return a slot for each value such that no two that exist at the same time share one."""
        slots = np.full_like(lives.first, ABSENT)
        for stage in range(self.shape.num_stages):
            free_from: list[int] = []
            own = np.nonzero(lives.exist & (self.stage == stage))
            lists = (each.tolist() for each in (lives.first[own], lives.last[own], *own))
            for first, last, microbatch, virtual in sorted(zip(*lists, strict=True)):
                slot = next((n for n, tick in enumerate(free_from) if tick < first), len(free_from))
                free_from[slot : slot + 1] = [last]
                slots[microbatch, virtual] = slot
        return slots

    def grid(self, ticks: _PerPass, values: _PerPass) -> _Grid:
        """Return values by the tick in which they are used, and by stage."""
        grid = np.full((self.num_ticks, self.shape.num_stages), ABSENT, np.int32)
        used = ticks != ABSENT
        grid[ticks[used], np.broadcast_to(self.stage, ticks.shape)[used]] = values[used]
        return grid

    def op(self, ticks: _PerPass, *slots: _PerPass) -> OpRow:
        microbatch = np.broadcast_to(np.arange(len(ticks))[:, None], ticks.shape)
        chunk = np.arange(self.shape.num_virtual) // self.shape.num_stages
        make: Any = OpRow
        return make(
            self.grid(ticks, microbatch),
            np.maximum(self.grid(ticks, np.broadcast_to(chunk, ticks.shape)), 0),
            *(self.grid(ticks, each) for each in slots),
        )


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


def _sent(arrivals: _Grid) -> NDArray[np.bool_]:
    """Return for each tick whether any stage sends, so that something arrives before the next."""
    arrives = (arrivals != ABSENT).any(axis=1)
    return np.broadcast_to(np.append(arrives[1:], False)[:, None], arrivals.shape)


def table_rows(table: TickTable, rounds: int = 1) -> tuple[SlotCounts, TickRow]:
    """Return a table as arrays [ticks, stages], repeated ``rounds`` times on new microbatches."""
    one, count = allocate_slots(table), table.shape.num_microbatches
    parts = [_later(one, number * count) for number in range(rounds)]
    return count_slots(table), jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def packed(rows: TickRow) -> tuple[Array, Callable[[Array], TickRow]]:
    """Return the rows of a stage as one array [ticks, columns], and a function that unpacks a row.

    A tick then reads one row, not a number from each of many arrays, for which accelerators would
    start as many kernels.
    """
    columns, tree = jax.tree.flatten(rows)
    dtypes = [column.dtype for column in columns]

    def read(row: Array) -> TickRow:
        row = lax.optimization_barrier(row)
        return jax.tree.unflatten(tree, [row[n].astype(dtype) for n, dtype in enumerate(dtypes)])

    return jnp.stack([column.astype(jnp.int32) for column in columns], 1), read


def _later(row: TickRow, by: int) -> TickRow:
    def shift(op: OpRow) -> OpRow:
        moved: Any = np.where(op.microbatch == ABSENT, ABSENT, op.microbatch + by).astype(np.int32)
        return replace(op, microbatch=moved)

    return replace(
        row, forward=shift(row.forward), backward=shift(row.backward), weight=shift(row.weight)
    )


class TickOp(StrEnum):
    """The operations of a tick, by their names in the compiled program.

    Stages send in one direction (send, send_back), or where the program asks once for both, in a
    branch that sends in one direction only, and in one that sends in both.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    EMBEDDING = "embedding"
    HEAD = "head"
    SEND = "send"
    SEND_BACK = "send_back"
    ONLY_SEND = "only_send"
    ONLY_SEND_BACK = "only_send_back"
    BOTH_SEND = "both_send"
    BOTH_SEND_BACK = "both_send_back"


F = TypeVar("F", bound=Callable[..., object])

_MARK = "tick-"
_NAMED = re.compile(rf"{_MARK}(\w+)")


def named(operation: TickOp, function: F) -> F:
    """Return the function, its traced operations named after an operation of a tick."""
    return jax.named_scope(_MARK + operation)(function)


@dataclass(frozen=True)
class OpCounts:
    """How often each stage runs which operation in one step."""

    ticks: int
    counts: Mapping[TickOp, Sequence[int]]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.counts[TickOp.FORWARD])

    def times(self, op_name: str, count: int, stage: int) -> int:
        """Return how often a stage runs an instruction; ``count`` is how often if in every tick."""
        operations = _NAMED.findall(op_name)
        if not operations:
            return count
        return count // self.ticks * self.counts[TickOp(operations[-1])][stage]


def count_operations(
    schedule: Schedule, num_microbatches: int, num_stages: int, rounds: int = 1
) -> OpCounts:
    """Count the operations in the table that stages execute."""
    table = schedule.table(num_microbatches, num_stages)
    _, rows = table_rows(table, rounds)
    forward, backward = (np.asarray(op.microbatch) >= 0 for op in (rows.forward, rows.backward))
    starts = forward & (np.asarray(rows.forward.reads) < 0)
    stages = np.arange(num_stages)
    ahead, back = (np.isin(stages, [a for a, _ in table.shape.ring(step)]) for step in (1, -1))
    sends, sends_back = np.asarray(rows.sends), np.asarray(rows.sends_back)
    runs = {
        TickOp.FORWARD: forward,
        TickOp.BACKWARD: backward,
        TickOp.WEIGHT: np.asarray(rows.weight.microbatch) >= 0,
        TickOp.EMBEDDING: starts,
        TickOp.HEAD: np.asarray(rows.gradient_own) >= 0,
        TickOp.SEND: sends & ahead,
        TickOp.SEND_BACK: sends_back & back,
        TickOp.ONLY_SEND: sends & ~sends_back & ahead,
        TickOp.ONLY_SEND_BACK: ~sends & sends_back & back,
        TickOp.BOTH_SEND: sends & sends_back & ahead,
        TickOp.BOTH_SEND_BACK: sends & sends_back & back,
    }
    counts = {name: [int(n) for n in mask.sum(0)] for name, mask in runs.items()}
    return OpCounts(len(forward), counts)
